"""Meshes and placements that a search chooses for 12 runs, beside those recorded in choices.json.

    python tests/cost/choices.py             # compare every case with its record
    python tests/cost/choices.py --record    # replace the records

A choice is judged by the dry run of its flags, which traces all of them: whether it fits, and the seconds of a step.
The record has the CPU-seconds of each search, for a reader; nothing checks them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from funrl.algos.recipes import recipe
from funrl.cost.report import dry_run
from funrl.cost.search import chosen_devices
from funrl.cost.tracing.hardware import HARDWARE
from funrl.trainer.settings.settings import flag_value, settings_of, with_flags

TABLE = Path(__file__).with_suffix(".json")


def read_table():
    return json.loads(TABLE.read_text())


def case_settings(table, case, folder):
    """The flags of a case and its algorithm."""
    flags = dict(case["flags"])
    arguments = {"kl_coef": flags.pop("kl_coef")} if "kl_coef" in flags else {}
    if case["model"] is not None:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(table["models"][case["model"]]))
        flags["model"] = str(path)
    shared = {"dry_run": True, "hardware": "h100", "dtype": "bfloat16"}
    return settings_of(**shared | flags), lambda: recipe(case["recipe"])(**arguments)


def choose(settings, compose):
    """Flags that a search chooses."""
    chosen, _ = chosen_devices(settings, compose, HARDWARE[settings.estimate.hardware])
    names = ("mesh", "generate_mesh", "place", "fsdp", "fsdp_axes", "remat", "token_budget")
    values = {name: flag_value(chosen, name) for name in names}
    return {name: value for name, value in values.items() if value != flag_value(settings, name)}


def judge(settings, compose, flags):
    """Whether chosen flags fit, and the seconds of a step, by a dry run that traces every pool."""
    result = json.loads(dry_run(with_flags(settings, **flags, json=True), compose))
    pools = [result] if "fits" in result else [x for x in result.values() if isinstance(x, dict) and "fits" in x]
    return {"fits": all(pool["fits"] for pool in pools), "seconds": result["step"]["seconds"]}


def run_case(name):
    """Choice of a case, its cost by a trace, and the CPU-seconds of the search."""
    table = read_table()
    case = next(case for case in table["cases"] if case["name"] == name)
    with tempfile.TemporaryDirectory() as folder:
        settings, compose = case_settings(table, case, folder)
        start = time.process_time()
        flags = choose(settings, compose)
        cpu_seconds = time.process_time() - start
        return {"flags": flags} | judge(settings, compose, flags) | {"cpu_seconds": round(cpu_seconds, 1)}


def processor():
    return re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]


def main(argv):
    if argv and argv[0] == "--case":
        print(json.dumps(run_case(argv[1])))
        return
    table = read_table()
    for case in table["cases"]:
        program = [sys.executable, __file__, "--case", case["name"]]
        done = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            print(f"{case['name']}: {done.stderr[-1500:]}")
            continue
        chosen = json.loads(done.stdout.splitlines()[-1])
        recorded = case.get("chosen", chosen)
        same = "the same" if chosen["flags"] == recorded["flags"] else "another"
        print(f"{case['name']}: {same}: {chosen} (recorded: {recorded})", flush=True)
        if "--record" in argv:
            case["chosen"] = chosen
    if "--record" in argv:
        table["processor"] = processor()
        TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
