"""Where runs run: on this machine or on SLURM. Starting, watching and cancelling them, from any process.

All that is known of a run is in its folder, so that another process can take over:

    job.json       who runs it: a process of this machine, or a job of SLURM (`record`)
    outcome.json   how it ended; written by the process that supervises it (`outcome`)

`local` and `slurm` start runs, `jobs` says which of them go on and cancels them, whoever has started them.
"""
