"""A stand-in for Lean: counts goals by the first words of tactics.

    fake_lean(folder)               writes folder/bin/lean, returns its path
    fake_lean(folder, "crash")      one that fails: see TROUBLE

It knows the protocol, and no logic.
"""

import os
import sys
from pathlib import Path

PYTHON = os.path.realpath(sys._base_executable)
PROGRAM = """\
#!{python} -S
import json, os, sys
if "--print-prefix" in sys.argv:
    print(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.exit()
assert sys.argv[1:] == ["--stdin", "--json", "--threads=1"], sys.argv
{trouble}
lines = sys.stdin.buffer.read().decode().splitlines()
at = next(i for i, line in enumerate(lines) if line.startswith("theorem to_prove ")) + 1
assert lines[-1] == "#print axioms to_prove" and lines[at - 1].endswith(" := by")
failed = False
def say(severity, line, data):
    global failed
    failed |= severity == "error"
    print(json.dumps(dict(severity=severity, pos=dict(line=line, column=2), endPos=None, fileName="<stdin>", data=data, kind="x")))
goals, axioms = 1, ""
CHANGE = dict(intro=0, constructor=1, exact=-1, apply=0, left=0, right=0, rcases=1, omega=-1, rw=0, have=0, grind=-1)
CLOSING = ("rw [h1]",) if " : f " in lines[at - 1] else ()
for n, line in enumerate(lines[at:-1], at + 1):
    tactic = line.strip()
    if goals == 0:
        say("error", n, "no goals to be proved")
    elif tactic.split()[0] not in CHANGE:
        say("error", n, "tactic failed, there is no " + tactic)
    elif tactic == "have : False := by omega":
        say("error", n, "unsolved goals\\n\\u22a2 False")
    else:
        goals += -1 if tactic in CLOSING else CHANGE[tactic.split()[0]]
        axioms = "propext, Lean.ofReduceBool" if tactic.startswith("grind") else axioms
if goals and not failed:
    say("error", at, "unsolved goals\\n" + "\\n\\n".join(["h : \\U0001d4ab\\n\\u22a2 p"] * goals))
say("info", len(lines), "'to_prove' depends on axioms: [" + axioms + "]" if axioms else "'to_prove' does not depend on any axioms")
sys.exit(failed)
"""
PROVED = """print('{"severity": "info", "pos": {"line": 3}, "data": "\\'to_prove\\' does not depend on any axioms"}'); """
TROUBLE = {
    "": "",
    "crash": "os.kill(os.getpid(), 11)",
    "hang": "while True: pass",
    "nothing": "sys.exit(0)",
    "nonsense": "print('error: out of memory'); sys.exit(0)",
    "not a message": "print('[1, 2]'); sys.exit(0)",
    "half a message": """print('{"severity": "error", "pos": {"line"'); sys.exit(0)""",
    "deep": "print('[' * 50_000); sys.exit(0)",
    "bytes": "sys.stdout.buffer.write(b'\\xff\\xfe\\x00'); sys.exit(0)",
    "endless": "while True: print('{}')",
    "warnings only": """print('{"severity": "warning", "pos": {"line": 1}, "data": "declaration uses sorry"}'); sys.exit(0)""",
    "another theorem's axioms": """print('{"severity": "info", "pos": {"line": 1}, "data": "\\'x\\' does not depend on any axioms"}'); sys.exit(0)""",
    "proved, and failed": PROVED + "sys.exit(1)",
    "proved, and dies": PROVED + "sys.stdout.flush(); os.kill(os.getpid(), 9)",
    "proved, and hangs": PROVED + "sys.stdout.flush()\nwhile True: pass",
    "proved, and not": PROVED.replace("does not depend on any axioms", "depends on axioms: [sorryAx]") + PROVED + "sys.exit(0)",
    "empty goals": """print('{"severity": "error", "pos": {"line": 1}, "data": "unsolved goals"}'); sys.exit(1)""",
}


def fake_lean(folder: Path, trouble: str = "") -> str:
    path = folder / "bin" / "lean"
    path.parent.mkdir(parents=True)
    path.write_text(PROGRAM.format(python=PYTHON, trouble=TROUBLE[trouble]), encoding="utf-8")
    for place in (folder, path.parent, path):
        place.chmod(0o755)  # Lean runs as nobody when root runs this
    return str(path)
