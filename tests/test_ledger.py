"""The ledger of tests: each one of before the redesign still runs, runs under another name, or went for a reason.

A row of `ledger.csv` has the test's old id and its number of cases; `now`, empty where the id is the same, "-" where
the test went, else its new id, or several with blanks between them; and the reason why it went or has fewer cases.
"""

import ast
import csv
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SLOW = 69
"""Cases that were marked slow when the ledger was made."""


def count_cases(test, collected):
    """Count the cases of a test that this session collected; of a module that it did not collect, the definitions."""
    module, _, name = test.partition("::")
    if any(other.startswith(f"{module}::") for other in collected):
        return collected[test]
    if not (ROOT / module).is_file():
        return 0
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    return sum(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_ledger_accounts_for_every_earlier_test(collected_tests):
    """A test that vanishes in a move would take its number with it."""
    collected = Counter(nodeid.split("[")[0] for nodeid, _ in collected_tests)
    modules = {nodeid.split("::")[0] for nodeid in collected}
    wrong = []
    with (Path(__file__).parent / "ledger.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            removed = row["now"] == "-"
            tests = [row["test"]] if removed else (row["now"] or row["test"]).split()
            counts = [count_cases(test, collected) for test in tests]
            fewer = sum(counts) < int(row["cases"]) and all(test.split("::")[0] in modules for test in tests)
            if removed and counts[0]:
                wrong.append(f"{row['test']} went by the ledger, and still runs")
            elif not removed and 0 in counts:
                wrong.append(f"{row['test']} is not collected as {tests[counts.index(0)]}")
            elif (removed or fewer) and not row["reason"]:
                wrong.append(f"{row['test']} had {row['cases']} cases, has {sum(counts)}, and no reason is given")
    assert not wrong, "\n".join(wrong)


def test_number_of_slow_cases_does_not_grow(collected_tests):
    """A slow mark takes a test out of the default run."""
    assert sum(slow for _, slow in collected_tests) <= SLOW
