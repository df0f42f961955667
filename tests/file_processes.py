"""A pytest plugin: the tests of each file run in a process of their own, forked when all is imported.

TensorFlow's runtime keeps some 80 MB of every program that it compiles for as long as the process lives; in
one process the programs of all tests would take 6 GB. `--one-process` switches it off, for a debugger.
"""

import multiprocessing
import os
import warnings

import pytest
from _pytest.runner import runtestprotocol


class FileProcess:
    """The process in which the tests of one file run; made where none of them has begun.

    Args:
        session: pytest's, with the tests collected.
    """

    def __init__(self, session):
        self._session = session
        self._connection, other_end = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: neither backend has computed anything here
            self._number = os.fork()
        if self._number == 0:
            self._connection.close()
            status = 1
            try:
                self._serve(other_end)
                status = 0
            finally:
                # Nothing that was begun before the fork is ended here
                os._exit(status)
        other_end.close()

    def run(self, item, next_item):
        """Run a test: list of reports.

        Args:
            item: The test.
            next_item: The next one of its file; None after the last, with which the process ends.
        """
        places = [one and self._session.items.index(one) for one in (item, next_item)]
        self._connection.send(places)
        try:
            contents = self._connection.recv()
        except EOFError:
            return [self._crash(item)]
        if next_item is None:
            self.end()
        config = self._session.config
        return [config.hook.pytest_report_from_serializable(config=config, data=data) for data in contents]

    def end(self):
        """Wait until the process has ended: its status as from `os.waitstatus_to_exitcode`."""
        self._connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._number, 0)[1])

    def _serve(self, connection):
        config, items, next_place = self._session.config, self._session.items, 0
        while next_place is not None:
            try:
                place, next_place = connection.recv()
            except EOFError:  # the run was stopped
                return
            next_item = None if next_place is None else items[next_place]
            reports = runtestprotocol(items[place], nextitem=next_item, log=False)
            connection.send(
                [
                    config.hook.pytest_report_to_serializable(config=config, report=report)
                    for report in reports
                ]
            )

    def _crash(self, item):
        reason = f"the process of {item.path.name} ended in this test, with status {self.end()}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")


class FileProcesses:
    """Hands each test to the process of its file."""

    def __init__(self):
        self._path, self._process = None, None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if self._path != item.path:
            self._path, self._process = item.path, FileProcess(item.session)
        if nextitem is not None and nextitem.path != item.path:
            nextitem = None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self._process.run(item, nextitem)
        if nextitem is None or reports[-1].when != "teardown":
            self._path = None
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl
    def pytest_sessionfinish(self):
        if self._path is not None:
            self._process.end()


def pytest_addoption(parser):
    parser.addoption("--one-process", action="store_true", help="all tests in this process, as under --pdb")


def pytest_configure(config):
    if not (config.option.one_process or config.option.usepdb):
        config.pluginmanager.register(FileProcesses())
