"""The style sheet of the report: light and dark, from a phone's width up."""

# Ten colours in an order in which neighbours differ for every kind of colour vision, the grey of "other", and one more.
LIGHT = "#2f66d0 #e2872b #2a9d84 #c2507f #7a62c9 #8f9a2e #45a7d6 #a0694a #d0453f #5d7f8f #9a9a9a #7d4b1f"
DARK = "#7aa5ff #f0a355 #4fc4a8 #e884ad #a996f0 #bcc85a #74c6ee #c99472 #f07a72 #8fb2c2 #8b8b8b #d9b48a"


def _colours(values: str) -> str:
    return "".join(f"--c{i}:{value};" for i, value in enumerate(values.split()))


def _classes(count: int) -> str:
    return "".join(f".c{i}{{--c:var(--c{i})}}" for i in range(count))


STYLE = (
    ":root{--page:#f6f6f3;--card:#fff;--ink:#1c1d1f;--soft:#63666b;--line:#e4e4df;--grid:#ebebe6;"
    "--good:#1d7a4f;--goodbg:#def3e7;--some:#8a5a0b;--somebg:#fbefd6;--bad:#a8322c;--badbg:#fbe4e2;--mark:#fbefd6;"
    + _colours(LIGHT)
    + "}@media(prefers-color-scheme:dark){:root{--page:#131416;--card:#1c1e21;--ink:#e9e9e6;--soft:#9da1a8;"
    "--line:#2d3035;--grid:#292c30;--good:#7bdcab;--goodbg:#173527;--some:#efc173;--somebg:#3a2d13;--bad:#f59a93;--badbg:#40201e;"
    "--mark:#4a3a17;"
    + _colours(DARK)
    + "}}"
    + _classes(len(LIGHT.split()))
    + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1160px;margin:0 auto;padding:48px 24px 80px}
h1,h2,h3,p,ul,dl,dd,figure{margin:0;padding:0}
h1{font-size:clamp(28px,4.4vw,42px);line-height:1.12;letter-spacing:-.022em;font-weight:680;overflow-wrap:anywhere}
h2{font-size:20px;letter-spacing:-.01em;font-weight:650;margin:0 0 14px}
h3{font-size:14px;font-weight:600;color:var(--soft);margin:0 0 10px}
section{margin-top:44px}
.over{font-size:12px;font-weight:650;letter-spacing:.09em;text-transform:uppercase;color:var(--soft);margin-bottom:8px}
.chips{list-style:none;display:flex;flex-wrap:wrap;gap:2px 20px;margin-top:12px;color:var(--soft);font-size:14px}
.noticed{padding-left:20px;max-width:80ch;line-height:1.5}
.chips b{color:var(--ink);font-weight:600;overflow-wrap:anywhere}
.headline{font-size:clamp(19px,2.5vw,25px);line-height:1.36;letter-spacing:-.012em;margin-top:30px;max-width:36em;
text-wrap:balance}
.headline b{font-weight:680;color:var(--c0)}
mark{background:var(--mark);color:inherit;border-radius:5px;padding:1px 7px;font-size:.82em;white-space:nowrap}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;margin-top:26px;
background:var(--line);border:1px solid var(--line);border-radius:12px;overflow:hidden}
.tile{background:var(--card);padding:14px 16px}
.tile dt{font-size:13px;color:var(--soft)}
.tile dd{font-size:25px;font-weight:640;letter-spacing:-.02em;line-height:1.3;white-space:nowrap}
.tile dd.sub{font-size:12.5px;font-weight:400;letter-spacing:0;color:var(--soft);white-space:normal;line-height:1.4}
.grid{display:grid;gap:16px}
.two{grid-template-columns:repeat(2,minmax(0,1fr))}
.three{grid-template-columns:repeat(3,minmax(0,1fr))}
.time{grid-template-columns:minmax(0,1fr) minmax(0,2fr)}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 16px 12px}
figcaption{display:grid;grid-template-columns:1fr auto;gap:0 12px;font-size:14.5px;line-height:1.4}
figcaption b,figcaption output{font-weight:640}
figcaption small{grid-column:1/-1;color:var(--soft);font-size:12.5px;min-height:1.4em}
figure.card{display:flex;flex-direction:column}
.legend{grid-column:1/-1;display:flex;flex-wrap:wrap;gap:0 14px;font-size:12.5px;color:var(--soft);margin-top:3px}
.legend span{overflow-wrap:anywhere}.legend b{color:var(--ink);font-weight:640;margin-left:5px}
.lead{font-size:13.5px;color:var(--soft);margin:-8px 0 14px}.lead mark{white-space:normal;overflow-wrap:anywhere}
.key{display:inline-block;width:9px;height:9px;border-radius:3px;background:var(--c);margin-right:6px}
.note{font-size:12px;color:var(--soft);margin-top:6px}
.plot{display:grid;grid-template-columns:auto 1fr;grid-template-rows:minmax(150px,1fr) 20px;flex:1;font-size:11.5px;
color:var(--soft);margin-top:14px}
.two .plot,.time .plot{grid-template-rows:minmax(220px,1fr) 20px}
.two>figure:only-child{grid-column:1/-1}
.y{position:relative}
.y span{position:absolute;right:9px;transform:translateY(50%);line-height:1;white-space:nowrap}
.x{grid-column:2;position:relative;margin-right:8px}
.x span{position:absolute;top:7px;transform:translateX(-50%);line-height:1;white-space:nowrap}
.area{position:relative;margin-right:8px}
svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;display:block}
svg path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
.area .grid{stroke:var(--grid);stroke-width:1}
svg .line{stroke:var(--c);stroke-width:2}
svg .raw{stroke:var(--c);stroke-width:1;opacity:.32}
svg .dot{stroke:var(--c);stroke-width:7}
svg .fill{fill:var(--c);stroke:none}
.bands{position:absolute;inset:0;display:flex}
.bands i{flex:1}
.bands i:hover{background:linear-gradient(var(--soft),var(--soft)) center/1px 100% no-repeat}
.bands i:hover::after{content:attr(data-t);position:absolute;top:-13px;right:0;max-width:100%;padding:4px 9px;
border-radius:7px;background:var(--ink);color:var(--card);font:500 12px/1.4 system-ui,sans-serif;
pointer-events:none;z-index:1}
.bar{display:flex;gap:2px;height:14px;border-radius:5px;overflow:hidden;margin:14px 0 8px}
.bar i{background:var(--c);min-width:1px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
.phases td{padding:4px 0;border-top:1px solid var(--line)}
.phases tr:first-child td{border:0}
.phases td+td{text-align:right;color:var(--soft);white-space:nowrap;padding-left:12px}
.phases td+td+td{color:var(--ink);width:3.6em}
.samples .card{margin-bottom:10px;padding:10px 14px 12px}
.about{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:center;gap:2px 10px;font-size:12.5px;
color:var(--soft);white-space:nowrap}.about small{font-size:12px}
.evaluation th{text-align:left;font-weight:600;color:var(--soft);padding:6px 10px}
.evaluation td{vertical-align:top;padding:6px 10px;border-top:1px solid var(--line)}
.evaluation pre{margin:0;font-size:13px;max-height:9em}
.pill{border-radius:99px;padding:1px 9px;font-weight:600;white-space:nowrap}
.good{color:var(--good);background:var(--goodbg)}.some{color:var(--some);background:var(--somebg)}
.bad{color:var(--bad);background:var(--badbg)}
pre{margin:6px 0 0;font:14px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre-wrap;overflow-wrap:anywhere;max-height:15em;overflow:auto}
pre span{color:var(--soft)}
pre em{color:var(--soft);font-family:system-ui,sans-serif;font-size:12.5px}
details summary{cursor:pointer;font-size:14.5px;padding:2px 0}
.config{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:22px 40px;margin-top:12px;align-items:start}
.config table+table{margin-top:22px}
.config caption{text-align:left;font-weight:640;font-size:13.5px;padding-bottom:4px}
.config th,.config td{text-align:left;vertical-align:top;padding:4px 0;border-top:1px solid var(--line);font-weight:400}
.config th{color:var(--soft);width:34%;padding-right:16px;overflow-wrap:anywhere}
.config td{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12.5px;
overflow-wrap:anywhere}
.wide{overflow-x:auto}
.runs th,.runs td,.differ th,.differ td{text-align:left;vertical-align:top;padding:6px 18px 6px 0;
border-top:1px solid var(--line);font-weight:400}
.runs tr:first-child th,.differ tr:first-child th{border:0;color:var(--soft)}
.runs th:first-child{white-space:nowrap;font-weight:600}
.runs td{white-space:nowrap}
.runs td small{display:block;color:var(--soft);white-space:normal;min-width:9em}
.differ th:first-child{color:var(--soft)}
.differ td{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:12.5px;
overflow-wrap:anywhere;min-width:9em}
@media(max-width:980px){.three{grid-template-columns:repeat(2,minmax(0,1fr))}.time{grid-template-columns:minmax(0,1fr)}}
@media(max-width:640px){main{padding:28px 14px 56px}.two,.three,.config{grid-template-columns:minmax(0,1fr)}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.tile:last-child:nth-child(odd){grid-column:1/-1}section{margin-top:34px}.grid{gap:12px}
.two .plot,.time .plot{grid-template-rows:minmax(180px,1fr) 20px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""
)
