"""Verdicts of a teacher: given answer, right answer, verdict. Each pair was judged by thought."""

import re
from pathlib import Path

import pytest

from funrl.rewards.formulas import boxed_answer, math_answer

PAIRS = {
    "numbers": r"""
1.5 million || 1500000 || 1
2 billion || 2 million || 0
33.33\% || 33\frac13\% || 0
10000 || 10\,000 || 1
0 || 10\,000 || 0
10\,000 || 10000 || 1
10 000 || 10000 || 1
10\ 000 || 10000 || 1
10\;000 || 10000 || 1
10~000 || 10000 || 1
501 || 1\,500 || 0
0 || 20 000 || 0
12 34 || 1234 || 0
2\,000\,000 || 2000000 || 1
1\,234.5 || 1234.5 || 1
1{,}234{,}567 || 1234567 || 1
1,000 || 1000 || 1
1,23 || 123 || 0
100,000 || 100000 || 1
-1,000 || -1000 || 1
1e-05 || 0.00001 || 1
1e-05 || 1 || 0
1e3 || 1000 || 1
1e3 || 1e3 || 1
25000000000 || 2.5e10 || 1
2.5 \times 10^{-7} || 2.5e-7 || 1
6.02e23 || 6.02 \times 10^{23} || 1
-1.5e-3 || -0.0015 || 1
1e400 || 1e401 || 0
1e999999999 || 5 || 0
0.0000001 || 0.0000002 || 0
10^{-7} || 0.0000001 || 1
\frac{1}{10^7} || 2\cdot10^{-7} || 0
\sqrt{2}\cdot 10^{-8} || \sqrt{3}\cdot10^{-8} || 0
0.333333 || \frac{1}{3} || 1
0.333 || \frac{1}{3} || 0
0.5555555556 || \frac{10}{2 \cdot 9} || 1
10^{-5} || 1e-05 || 1
2.5 \times 10^{-6} || 2.5e-06 || 1
\frac\pi2 || \frac{\pi}{2} || 1
\text{12 cm} || 12 cm || 1
\text{12 cm} || 12 m || 0
\frac{1\pm\sqrt5}{2} || \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2} || 1
\frac{1\pm\sqrt5}{2} || \frac{1+\sqrt5}{2} || 0
0<y<1 || 0<x<1 || 0
0.333 || \frac13 || 0
0.333333 || \frac13 || 1
0.67 || 2/3 || 0
0.666667 || 2/3 || 1
3.14 || \pi || 0
3.14159265 || \pi || 1
1.234567 || 1.2345674 || 1
1.2345 || 1.23454 || 0
1234567 || 1234567.4 || 0
1234567.5 || 1234567.9 || 0
0.\overline{3} || \frac13 || 1
+5 || 5 || 1
-5 || 5 || 0
-0 || 0 || 1
5.00 || 5 || 1
5. || 5 || 1
.5 || \frac12 || 1
007 || 7 || 1
2^{-3} || \frac18 || 1
2^{100} || 1267650600228229401496703205376 || 1
2^{100} || 1267650600228229401496703205377 || 0
123456789012345678901234567890 || 123456789012345678901234567891 || 0
\infty || inf || 1
-\infty || \infty || 0
inf || 5 || 0
nan || 5 || 0
undefined || 0 || 0
\frac{1}{0} || 0 || 0
9^{9^{9^9}} || 5 || 0
((9!)!)! || 5 || 0
""",
    "fractions and roots": r"""
\frac12 || 0.5 || 1
\frac{3}{-4} || -\frac{3}{4} || 1
\dfrac{3}{4} || 0.75 || 1
6/8 || 3/4 || 1
\frac{1.5}{2} || 0.75 || 1
1\frac12 || 1.5 || 1
1 1/2 || 1.5 || 1
-3\frac{1}{2} || -3.5 || 1
2\frac{x}{3} || \frac{2x}{3} || 1
\sqrt{8} || 2\sqrt2 || 1
\frac{\sqrt3}{3} || \frac{1}{\sqrt{3}} || 1
\sqrt{3+2\sqrt2} || 1+\sqrt2 || 1
\sqrt[3]{27} || 3 || 1
\log_2 8 || 3 || 1
\ln 2 || \log 2 || 0
\sin 30^\circ || \frac12 || 1
e^{i\pi} || -1 || 1
\frac{1}{i} || -i || 1
1-2i || 1+2i || 0
\binom{5}{2} || 10 || 1
5! || 120 || 1
\sum_{k=1}^{4} k || 10 || 1
101_2 || 101 || 1
101_2 || 101_3 || 0
""",
    "formulas and equations": r"""
3=x || 3 || 1
m+n = 47 || 47 || 1
3 || x+y=3 || 0
f(2)=5 || 5 || 1
P(X > 2) = 0.5 || \frac12 || 1
\angle ABC = 45^\circ || 45 || 1
x = 2+3 = 5 || 5 || 1
2\infty || \pi || 0
x<\frac{1}{2}+ || \frac{1}{2} || 0
x^2+2x+1 || (x+1)^2 || 1
x^2+2x || (x+1)^2 || 0
a^2+b^2 || (a+b)^2 || 0
\frac{a}{b} || \frac{b}{a} || 0
1.5x || \frac{3x}{2} || 1
\sin^2\theta || 1-\cos^2\theta || 1
|x-2| || |2-x| || 1
2n+1 || 2k+1 || 0
5m || 5 || 0
5x || 5 || 0
x=5 || 5 || 1
5 || x=5 || 1
x = 5 || x=6 || 0
y=5 || x=5 || 0
a=b || b=a || 1
f(x) = x^2 + 1 || x^2+1 || 1
y = x + 1 || x - y + 1 = 0 || 1
2x+2y=2 || x+y=1 || 1
x+y=3 || x+y=4 || 0
""",
    "units and per cents": r"""
5\mathrm{~cm} || 5 cm || 1
3 \times 10^{8} \text{ m/s} || 300000 \text{ km/s} || 1
5 \text{ million dollars} || \$5,000,000 || 1
3:00 \text{ p.m.} || 3:00 PM || 1
3:00 PM || 4:00 PM || 0
3:00 PM || 3:00 AM || 0
50\% || 50\% || 1
50 || 50\% || 1
50\% || 50 || 1
50 percent || 50\% || 1
12.5\% || 12.5 || 1
0.5 || 50\% || 0
50\% || 0.5 || 0
\frac{1}{2} || 50\% || 0
5 || 5 cm || 1
5\text{ cm} || 5 || 1
5 m || 5 cm || 0
500 cm || 5 m || 1
5\text{ cm}^2 || 5\text{ square centimeters} || 1
5\text{ cm}^2 || 5\text{ cm} || 0
1 \text{ m}^2 || 10000 \text{ cm}^2 || 1
25\pi\text{ cm}^2 || 25\pi || 1
9.8 m/s || 9.8 m/s^2 || 0
60 \text{ km/h} || 60 \text{ mph} || 0
60\text{ miles per hour} || 60 mph || 1
2 hours || 120 minutes || 1
3\frac{1}{2}\text{ hours} || 3.5 hours || 1
\$5 || 5 || 1
5 dollars || \$5 || 1
\$1{,}000.50 || 1000.5 || 1
50\text{ cents} || \$0.50 || 1
5 \text{ dollars} || 5 \text{ euros} || 0
45^\circ || 45 || 1
90^\circ || 90 \text{ degrees} || 1
32^\circ \text{C} || 32^\circ \text{F} || 0
90^\circ || 90\% || 0
12 \text{ apples} || 12 || 1
12 \text{ apples} || 12 \text{ oranges} || 0
12 \text{ square units} || 12 || 1
5^{\text{th}} || 5 || 1
third || 3 || 1
five || 5 || 1
""",
    "pairs, sets and lists": r"""
{1,3} || \{3,1\} || 1
{1,3} || (1,3) || 0
\{\text{red}, \text{blue}\} || \{\text{blue},\text{red}\} || 1
(1,3) || (1, 3) || 1
(3,1) || (1,3) || 0
\{1,3\} || (1,3) || 0
1,3 || (1,3) || 1
3,1 || (1,3) || 0
\{1,2\} || \{2,1\} || 1
\{1, 1, 2\} || \{1,2\} || 1
1,2 || 2,1 || 1
1,2,3 || 1,2 || 0
5 || 5,6 || 0
\{5\} || 5 || 1
\{1,2,3\} || 1,2,3 || 1
(100,200) || 100200 || 0
\pm 3 || 3,-3 || 1
2 || \pm 2 || 0
2 \pm \sqrt{3} || 2+\sqrt{3}, 2-\sqrt{3} || 1
x=1\text{ or }x=3 || 3, 1 || 1
1\text{ and }3 || 3, 1 || 1
x_1=3, x_2=2 || 2,3 || 1
x=1, y=2 || (1,2) || 1
x=2, y=1 || (1,2) || 0
(x,y) = (1,2) || x=1, y=2 || 1
(1,2),(3,4) || (3,4),(1,2) || 1
(1,2),(3,4) || (2,1),(3,4) || 0
\langle 1, 2\rangle || (1,2) || 1
\emptyset || \text{no solution} || 1
\begin{pmatrix}1\\2\end{pmatrix} || \begin{bmatrix}1\\2\end{bmatrix} || 1
\begin{pmatrix}1\\2\end{pmatrix} || \begin{pmatrix}1&2\end{pmatrix} || 0
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \begin{pmatrix}1&2\\4&3\end{pmatrix} || 0
\begin{pmatrix}\frac12\\0.25\end{pmatrix} || \begin{pmatrix}0.5\\ \frac14\end{pmatrix} || 1
\begin{vmatrix}1&2\\3&4\end{vmatrix} || -2 || 1
\begin{cases}1\\2\end{cases} || 2, 1 || 1
\begin{cases}1\\3\end{cases} || 1, 2 || 0
x=1, y=2 || \begin{cases}x=1\\y=2\end{cases} || 1
x=2, y=1 || \begin{cases}x=1\\y=2\end{cases} || 0
""",
    "intervals": r"""
|x|\le 2 || [-2,2] || 1
|x|<2 || [-2,2] || 0
(-oo ; 3) || (-\infty,3) || 1
-\infty < x < \infty || \mathbb{R} || 1
(1,2] || [1,2) || 0
[1,3] || (1,3) || 0
[1, 2] || \{1,2\} || 0
]1,3[ || (1,3) || 1
1<x<3 || (1,3) || 1
(1,3) || 1<x<3 || 1
3 > x > 1 || (1,3) || 1
1\le x<3 || [1,3) || 1
x\in(1,3) || (1,3) || 1
\{x \mid 1<x<3\} || (1,3) || 1
x>2 || (2,\infty) || 1
x\ge 2 || (2,\infty) || 0
x > 3 || x < 3 || 0
-1 \geq x || (-\infty,-1] || 1
(-\infty,1)\cup(3,\infty) || (3,\infty) \cup (-\infty,1) || 1
x<1 \text{ or } x>3 || (-\infty,1)\cup(3,\infty) || 1
x>1 \text{ and } x\le 3 || (1,3] || 1
(-\infty, 2) \cup (2, \infty) || x \neq 2 || 1
[-1,0)\cup(0,1] || [-1,1] || 0
\text{all real numbers} || (-\infty, \infty) || 1
""",
    "words": r"""
monday || \text{Monday} || 1
dayMon || Monday || 0
\text{Yes} || yes || 1
yes || no || 0
\textbf{(C)} || C || 1
(B) || A || 0
\text{Option B} || B || 1
Monday, Tuesday || Tuesday and Monday || 1
\text{None} || 0 || 0
\overline{AB} || \overline{CD} || 0
""",
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_verdict_is_that_of_a_teacher(kind):
    pytest.importorskip("math_verify")
    wrong = []
    for line in PAIRS[kind].strip().splitlines():
        given, wanted, verdict = line.split(" || ")
        text = rf"\boxed{{{given}}}"
        if math_answer("", text, answer=wanted) != float(verdict):
            wrong.append(line)
        assert boxed_answer("", text, answer=wanted) == math_answer("", text, answer=rf"So \boxed{{{wanted}}}."), line
    assert not wrong


def test_the_table_of_the_page_holds():
    pytest.importorskip("math_verify")
    page = (
        (Path(__file__).parents[3] / "docs/rewards.md")
        .read_text()
        .partition("## Formulas")[2]
        .partition("## Programs")[0]
    )
    rows = re.findall(r"^\| (`.*) \|$", page, re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        (wanted,), right, wrong, _ = (re.findall("`([^`]+)`", cell) for cell in row.split(" | "))
        assert {math_answer("", rf"\boxed{{{text}}}", answer=wanted) for text in right} == {1.0}, row
        assert {math_answer("", rf"\boxed{{{text}}}", answer=wanted) for text in wrong} == {0.0}, row
