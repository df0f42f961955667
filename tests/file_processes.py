"""A pytest plugin: the tests of each file run in a process of their own, forked when all is imported.

TensorFlow's runtime keeps some 80 MB of every program that it compiles for as long as the process lives; in
one process the programs of all tests would take 6 GB. Two files run at a time, and what they import is in
memory once. `--processes=0` switches it off, for a debugger.
"""

import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import warnings

import pytest
from _pytest.runner import runtestprotocol


class FileProcess:
    """The process in which tests of one file run; made where none of them has begun."""

    def __init__(self, config, items):
        self._config, self.items = config, list(items)  # those whose reports were not yet received
        # Ready when there are reports of the next test, or the process has ended; in it, the other end
        self.connection, other_end = multiprocessing.Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: neither backend has computed anything here
            self._number = os.fork()
        if self._number == 0:
            status = 1
            try:
                self.connection.close()
                self._serve(other_end)
                status = 0
            finally:
                # A plain exit would end what was begun before the fork
                os._exit(status)
        other_end.close()

    def receive(self):
        """Reports of the next test: list. A process that ended in it gives one of a failure."""
        try:
            contents = self.connection.recv()
        except EOFError:
            item = self.items.pop(0)
            reason = f"the process of {item.path.name} ended in this test, with status {self.end()}"
            return [pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")]
        item = self.items.pop(0)
        hook = self._config.hook
        reports = [
            hook.pytest_report_from_serializable(config=self._config, data=content) for content in contents
        ]
        if not self.items and (status := self.end()):
            reason = f"the process of {item.path.name} ended after this test, with status {status}"
            reports.append(pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "teardown"))
        return reports

    def end(self):
        """Wait until the process has ended: its status as from `os.waitstatus_to_exitcode`."""
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._number, 0)[1])

    def stop(self):
        """End the process where it is."""
        os.kill(self._number, signal.SIGTERM)
        self.end()

    def _serve(self, connection):
        # Captured output goes to a file, which processes would share
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        self.connection = connection
        self._config.pluginmanager.register(self)
        for item, next_item in itertools.zip_longest(self.items, self.items[1:]):
            # Other plugins wrap the hook: marks of warnings have no effect without it
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Run a test in the process and send its reports, which its own terminal would print."""
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        hook = self._config.hook
        self.connection.send(
            [hook.pytest_report_to_serializable(config=self._config, report=report) for report in reports]
        )
        return True


class FileProcesses:
    """Runs the tests file by file, `num_processes` files at a time."""

    def __init__(self, num_processes):
        self._num_processes = num_processes

    def pytest_runtestloop(self, session):
        if session.config.option.collectonly or session.testsfailed:  # of collecting
            return None
        session.config._tmp_path_factory.getbasetemp()  # one for all; pytest-xdist does the same
        gc.collect()
        gc.freeze()  # collecting writes to each object: a process would copy all that it shares
        files = [list(items) for _, items in itertools.groupby(session.items, key=lambda item: item.path)]
        running = {}
        try:
            while files or running:
                while files and len(running) < self._num_processes:
                    process = FileProcess(session.config, files.pop(0))
                    running[process.connection] = process
                for connection in multiprocessing.connection.wait(list(running)):
                    self._report(session.config.hook, running, files, connection)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            for process in running.values():
                process.stop()
        return True

    @staticmethod
    def _report(hook, running, files, connection):
        process = running[connection]
        item = process.items[0]
        reports = process.receive()
        if connection.closed:
            del running[connection]
            if process.items:  # it has crashed
                files.insert(0, process.items)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def pytest_addoption(parser):
    parser.addoption(
        "--processes",
        type=int,
        default=2,
        help="files of tests at a time, each in a separate process; 0: all in this process, as under --pdb",
    )


def pytest_configure(config):
    if config.option.processes and not config.option.usepdb:
        config.pluginmanager.register(FileProcesses(config.option.processes))
