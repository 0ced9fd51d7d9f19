"""One command as one job of SLURM: `linnaeus train --launcher slurm`. Nobody writes a job script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from linnaeus.launchers.options import LaunchOptions
from linnaeus.launchers.slurm import Slurm
from linnaeus.launchers.slurm_job import SlurmJob

FOLDER = "slurm"
"""Below the current folder: the scripts and logs of such jobs."""


def submit(
    options: LaunchOptions, command: str, words: Sequence[str], with_torchrun: bool, resumed_in: Path | None
) -> str:
    """Submit a command whose words have been checked.

    Args:
        options: where it runs.
        command: the word after `linnaeus`.
        words: those after the command.
        with_torchrun: whether it uses a process for each GPU.
        resumed_in: the folder of the run that goes on there when the job is queued again; None for a
            command that begins anew.

    Returns:
        What to print: the job with its log, and how to follow and cancel it; or the job's script.

    Raises:
        LinnaeusError: it cannot be submitted; the message says why.
    """
    folder = None if resumed_in is None else str(resumed_in.resolve())
    job = SlurmJob((command, *words), with_torchrun=with_torchrun, resumed_in=folder)
    slurm = Slurm(Path(FOLDER), options.slurm, f"linnaeus-{command}", describe=job.describe())
    if options.dry_run:
        return slurm.script(1)
    slurm.check(1)
    [job_id] = slurm.submit_jobs([job])
    log = shlex.quote(slurm.log(job_id))
    return (
        f"submitted as SLURM job {job_id}: linnaeus {shlex.join([command, *words])}\n"
        f"log:    {log}\n"
        f"follow: tail --retry --follow=name {log}\n"
        f"state:  squeue --jobs={job_id}\n"
        f"cancel: scancel {job_id}\n"
    )
