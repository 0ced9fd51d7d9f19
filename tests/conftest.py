"""Linnaeus as a user runs it: in this process where that is enough, else in child processes."""

import gc
import logging
import shlex
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from importlib import import_module

import pytest
from hypothesis import HealthCheck, settings

from linnaeus.main import cli
from linnaeus.runtime.log import close_logging
from tests.helpers import children
from tests.helpers.children import ROOT, Outcome
from tests.helpers.messages import compare
from tests.helpers.runs import TORCHRUN, freeze_what_is_there

settings.register_profile(
    "quick",
    max_examples=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=400)
settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """The tests' tensors are small: several threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    """Freeze imported modules, so that the garbage collections of searches are quick.

    `gc.get_freeze_count` takes 70 ms for them, so it is replaced.
    """
    freeze_what_is_there()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


def pytest_addoption(parser):
    parser.addoption("--rewrite-messages", action="store_true", help="write tests/messages/ anew")


@pytest.fixture
def golden(request):
    """Compares the messages of an area with its file in `tests/messages/`."""
    return partial(compare, request.config.getoption("--rewrite-messages"))


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        children.share_template()  # one for all workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Workers are forks of the template: each of them would import torch and timm for some 20 seconds."""
    if "coverage" in sys.modules:  # it counts lines that run while a module is imported
        return
    for spec in specs:
        spec.python = shlex.join([sys.executable, children.__file__])
        # of plugins of pytest that other packages contain
        spec.env["PYTEST_ADDOPTS"] = (
            "-W 'ignore:Module already imported:pytest.PytestAssertRewriteWarning'"
        )


def pytest_collection_modifyitems(items):
    """Whole runs, slow tests and those on a GPU may take longer than `timeout` in pyproject.toml."""
    for item in items:
        takes_long = any(item.get_closest_marker(name) for name in ("e2e", "slow", "gpu"))
        if takes_long and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Helpers stop waiting 10 s before pytest's timeout, so that a failing test can show the output."""
    marker = item.get_closest_marker("timeout")
    children.limit_s = float(marker.args[0] if marker else item.config.getini("timeout")) - 10


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_interrupts():
    """A shell that starts the tests in the background lets them ignore SIGINT, and their children too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _plain_log():
    """The log of Linnaeus is as no run has set it up."""
    logger = logging.getLogger("linnaeus")
    logger.propagate, logger.handlers[:] = True, []
    logger.setLevel(logging.NOTSET)
    yield
    close_logging()


@pytest.fixture(autouse=True, scope="session")
def _plain_environment(tmp_path_factory):
    """No terminal tricks, no uploads; children import this copy and have one thread; one folder for files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "true")
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def compiles_unseen(monkeypatch):
    """What the test compiles does not count in later tests of this process, which measure memory then."""
    import torch

    utils = import_module("torch._dynamo.utils")
    monkeypatch.setitem(utils.counters, "stats", Counter())
    yield
    torch.compiler.reset()


@pytest.fixture
def few_timed_steps(monkeypatch):
    """In this process two steps give a size's speed, for tests that do not depend on how exact it is."""
    monkeypatch.setattr("linnaeus.autobatch.trial.MIN_TIMED_STEPS", 2)
    monkeypatch.setattr("linnaeus.autobatch.trial.MIN_TIMED_S", 0.0)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    freeze_what_is_there()  # the command line imports most modules when it needs them

    def run_here(*argv):
        capfd.readouterr()
        code = cli(argv)
        return Outcome(code, *capfd.readouterr())

    return run_here


@pytest.fixture
def run_in_child(tmp_path):
    """Runs a command line in a process of its own, in an empty folder."""

    def run_there(*argv):
        return children.python("-m", "linnaeus.main", *argv, cwd=tmp_path)

    return run_there


@pytest.fixture
def torchrun(tmp_path):
    """Runs a command line in several processes under torchrun, in an empty folder."""

    def run_there(num_processes, *argv):
        command = [*TORCHRUN, f"--nproc_per_node={num_processes}", "-m", "linnaeus.main", *argv]
        return children.python(*command, cwd=tmp_path)

    return run_there
