"""A real SLURM of one node or several, all of them this machine, in a folder of its own.

Its controller, node daemon and munge have their own configuration, key, sockets, ports and state. Nothing of
it is known to, or leans on, a SLURM that the machine may belong to, and none of its processes outlives it.

Each node says that it has two CPUs and two GPUs, so that job scripts which ask for some need no change. The
first one has the name of this machine, which is an address too; of the others only SLURM knows the names.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from getpass import getuser
from socket import gethostname

import psutil
import pytest

from tests.helpers.children import ROOT
from tests.helpers.runs import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)),
        reason="needs slurmctld, slurmd, slurm-client and munge",
    ),
]
"""Of all tests that bring up a cluster."""
CONTROLLER = ("slurmctld", "-D", "-i")
GRACE_S = 20
"""Time between a preempted job's first signal and its end."""

CONFIGURATION = """\
ClusterName=linnaeus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=5,preempt_youngest_first
GresTypes=gpu
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""
NODE = """\
NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1024 Gres=gpu:2
"""


class Cluster:
    """The SLURM of a folder, while its context lasts.

    Args:
        folder: empty; its path is short enough for a socket in it.
        num_nodes: each with a daemon of its own.
        env: changes to this process's environment, for jobs and for the commands that submit them.
    """

    def __init__(self, folder, num_nodes=1, **env):
        self.folder = folder
        self._host = gethostname().partition(".")[0]
        self._nodes = [self._host, *(f"other{number}" for number in range(1, num_nodes))]
        self._daemons = []
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH"))
        }
        self.env = {**kept, **env, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        left = self._stop()
        assert not left, f"processes of jobs that have ended: {left}"

    def call(self, *command, cwd=None):
        """What a command of SLURM prints.

        Raises:
            AssertionError: it fails; with what it says.
        """
        done = self.try_call(*command, cwd=cwd)
        assert done.returncode == 0, done
        return done.stdout.strip()

    def try_call(self, *command, cwd=None):
        """How a command of SLURM ends."""
        options = {"capture_output": True, "text": True, "timeout": 120, "check": False}
        return subprocess.run(command, cwd=cwd or self.folder, env=self.env, **options)

    def show(self, job):
        """What the controller knows of a job, by the names that `scontrol show job` prints."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job, name, value, timeout_s=90):
        """Until `show` gives this value for this name.

        Raises:
            AssertionError: it does not within so many seconds; with what it gives.
        """
        self._await(lambda: self.show(job)[name] == value, timeout_s, lambda: str(self.show(job)))

    def stop_controller(self):
        """End the controller; jobs go on."""
        (daemon,) = [one for one in self._daemons if one.args == CONTROLLER]
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(30)
        self._daemons.remove(daemon)

    def start_controller(self):
        """Start the controller, with the state that an earlier one has left."""
        self._launch(*CONTROLLER)

    def _start(self):
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        controller_port, *ports = free_ports(1 + len(self._nodes))
        nodes = [
            NODE.format(name=name, port=port) for name, port in zip(self._nodes, ports, strict=True)
        ]
        general = CONFIGURATION.format(
            host=self._host,
            user=getuser(),
            folder=self.folder,
            grace_s=GRACE_S,
            controller_port=controller_port,
        )
        (self.folder / "slurm.conf").write_text("".join([general, *nodes]))
        for number in range(2):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        munge = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in files]
        self._launch("munged", "--foreground", "--force", "--num-threads=2", *munge)
        self._await((self.folder / "munge.socket").exists)
        self.start_controller()
        for name in self._nodes:
            self._launch("slurmd", "-D", "-N", name, log=f"slurmd.{name}")
        states = ("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T")
        up = ["idle"] * len(self._nodes)
        self._await(lambda: self.try_call(*states).stdout.split() == up)

    def _launch(self, *command, log=""):
        program = shutil.which(command[0])
        assert program is not None
        with (self.folder / f"{log or command[0]}.txt").open("wb") as file:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    executable=program,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )

    def _await(self, condition, timeout_s=30, shown=None):
        """As `wait_until`, but each look asks the controller, and states of SLURM may take minutes."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, (ended, self._logs())
            assert time.monotonic() < deadline, (shown or self._logs)()
            time.sleep(0.2)

    def _logs(self):
        return "\n".join(path.read_text() for path in self.folder.glob("*.txt"))

    def _stop(self):
        """End all jobs, then the daemons; kills and returns what is left of jobs after that."""
        with suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.call("scancel", "--user", getuser())
            self._await(lambda: not self.call("squeue", "--noheader"), 60)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        _, left = psutil.wait_procs(self._processes(), timeout=5)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        return left

    def _processes(self):
        """Of the jobs: whatever has this cluster in its environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    found.append(process)
        return found


EXPERIMENT = """\
EXPERIMENT: {NAME: small, DEVICE: cpu, WANDB: {ENABLED: true}}
MODEL: {_target_: tests.slurm.slow.Linear}
DATA:
  DATASET: {_target_: tests.helpers.odd_ranks.Dataset}
  IMG_SIZE: 8
  BATCH_SIZE: 8
  NUM_WORKERS: 1
  AUTOBATCH: {MAX_BATCH_SIZE: 8}
TRAIN: {EPOCHS: 40}
"""
ENV = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "CI": "true"}


LINNAEUS = (sys.executable, "-m", "linnaeus.main")
QUEUED_AGAIN = "queued again"
ON_SLURM = ("--launcher", "slurm", "--jobs", "2", "--slurm", "cpus-per-task=1", "time=30")


class Shell:
    """A command in a process of its own, as typed on a login node."""

    def __init__(self, slurm, folder, *argv):
        self.log = folder / "shell.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*LINNAEUS, *argv],
                cwd=folder,
                env=slurm.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end(self, number=None):
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(600)


def queue(slurm):
    """The jobs that have not ended."""
    return slurm.call("squeue", "--noheader", "--array", "--format=%i").split()
