"""The options of sbatch: which can be given, and how many processes they ask for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

Options = Mapping[str, str | None]
"""Options of sbatch by their long names without dashes; None for those without a value."""

GRACE_S = 180
"""Seconds before the time limit at which SLURM tells the job to save a checkpoint."""
SIGNAL_S = 60
"""The same for `signal=B:USR1`, which names none."""
_ONE_TASK = "each node has one task, which starts a process for each GPU; give nodes=N gpus-per-node=N"
_SHOWS = "only shows something, and submits nothing"
REFUSED = {
    "array": "a sweep makes the array; --jobs N limits how many of its runs go on at once",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-core"), _ONE_TASK),
    **dict.fromkeys(("ntasks-per-socket", "ntasks-per-gpu"), _ONE_TASK),
    "gpus": "all nodes have the same number; give gpus-per-node=N",
    "gpus-per-socket": "all nodes have the same number; give gpus-per-node=N",
    "chdir": "the paths in a configuration begin in the current folder; change to the other one first",
    "wrap": "the job's script is made from the command line",
    "test-only": "use --dry-run",
    "parsable": "the number of the job is printed anyway",
    "wait": "a sweep waits for its jobs",
    "quiet": "the number of the job has to be read",
    "no-requeue": "a run goes on after a preemption because its job goes back into the queue",
    "clusters": "the state of the jobs is asked of this cluster; log in on the other one",
    **dict.fromkeys(("help", "usage", "version"), _SHOWS),
}  # fmt: skip
"""Options that would take the place of what the job's script is made for, each with what to do."""
_NAMES = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint
contiguous container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
delay-boot dependency distribution error exclude exclusive export export-file external extra
extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
gres-flags help hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user
mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-bell no-kill no-requeue nodefile
nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step
open-mode output overcommit oversubscribe parsable partition power prefer priority profile propagate qos
quiet reboot requeue reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches
test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid usage use-min-nodes
verbose version wait wait-all-nodes wckey wrap
"""
KNOWN = frozenset(_NAMES.split())
"""The long options of sbatch; plugins of a cluster may add to them."""


def problems_with(options: Options) -> list[str]:
    """One sentence for each option that cannot be given; sbatch judges the rest."""
    problems = [f"--slurm {name}: {wrong}" for name in options if (wrong := _wrong(name))]
    signal = re.fullmatch(r"B:(?:SIG)?USR1(?:@(\d+))?", options.get("signal", f"B:USR1@{GRACE_S}") or "")
    if signal is None:
        problems.append(
            f"--slurm signal={options['signal']}: would end the ranks without a checkpoint; write "
            "signal=B:USR1@SECONDS, which tells the job's script"
        )
        return problems
    grace_s = int(signal[1] or SIGNAL_S)
    if grace_s == 0:
        problems.append(f"--slurm signal={options['signal']}: leaves no time for a checkpoint")
    problems += [
        f"--slurm {name}={options[name]}: a run is told {grace_s} s before the end to save a checkpoint, "
        "which leaves too little time to train; give it more time (a plain number is minutes), or "
        "signal=B:USR1@SECONDS"
        for name in ("time", "time-min")
        if (time_s := _seconds(options.get(name) or "")) and time_s <= 2 * grace_s
    ]
    return problems


def _wrong(name: str) -> str:
    """Why an option cannot be given, by its name; empty for one that sbatch may take."""
    if name in KNOWN:
        return REFUSED.get(name, "")
    if full := [known for known in sorted(KNOWN) if known.startswith(name)]:  # sbatch would take it for one
        return f"write the option in full: {' or '.join(full)}"
    return ""


def likely_misspelled(options: Options) -> list[str]:
    """One sentence for each option that is like one of sbatch; for where sbatch cannot be asked."""
    unknown = [name for name in options if name not in KNOWN and not name.startswith("container-")]  # pyxis
    near = {name: get_close_matches(name, KNOWN, n=1, cutoff=0.75) for name in unknown}
    return [
        f"--slurm {name}: no such option of sbatch; did you mean {found[0]}?"
        for name, found in near.items() if found
    ]  # fmt: skip


def _seconds(text: str) -> int | None:
    """A time as sbatch reads it, in seconds; 0 or None for no limit, None also for what sbatch will refuse.

    >>> _seconds("90"), _seconds("1:30"), _seconds("4:00:00"), _seconds("1-12"), _seconds("UNLIMITED")
    (5400, 90, 14400, 129600, None)
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, days or "0")) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def num_processes(options: Options) -> int:
    """Processes of a job with these options: one for each GPU, and one for each node without any.

    >>> num_processes({"nodes": "2", "gpus-per-node": "a100:4"}), num_processes({"gres": "gpu:2,shard:1"})
    (8, 2)
    >>> num_processes({"nodes": "3-4"}), num_processes({})
    (3, 1)
    """
    return num_nodes(options) * num_per_node(options)


def num_nodes(options: Options) -> int:
    """Nodes of a job, the fewest where a range is given."""
    return _count((options.get("nodes") or "1").partition("-")[0])


def num_per_node(options: Options) -> int:
    """Processes of each node of a job."""
    per_node = options.get("gpus-per-node") or options.get("gpus-per-task")
    kinds = per_node.split(",") if per_node else (options.get("gres") or "").split(",")
    of_node = [_count(kind) for kind in kinds if per_node or kind.partition(":")[0] == "gpu"]
    return max(sum(of_node), 1)


def _count(text: str) -> int:
    """The number at the end of a request such as `a100:4`; 1 without one."""
    number = text.rpartition(":")[2]
    return int(number) if number.isdecimal() else 1
