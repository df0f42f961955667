"""List the tests that pytest skipped, from its JUnit file, one node a line: arguments of another run.

python .ci/left_out.py tests.xml > left_out; python -m pytest @left_out
"""

import sys
import xml.etree.ElementTree as ElementTree


def left_out(path):
    """Nodes of skipped tests, and files that were skipped whole: list of str."""
    nodes = []
    for case in ElementTree.parse(path).iter("testcase"):
        if case.find("skipped") is None:
            continue
        folder, _, name = case.get("classname"), None, case.get("name")
        if folder:
            nodes.append(f"{folder.replace('.', '/')}.py::{name}")
        else:  # a file that was skipped when it was collected
            nodes.append(f"{name.replace('.', '/')}.py")
    return nodes


if __name__ == "__main__":
    print("\n".join(left_out(sys.argv[1])))
