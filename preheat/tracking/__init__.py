"""Experiment trackers: the metrics, evaluations, samples and report of a run, sent from its folder.

The run folder is the only source: a process of its own reads what the run appends to it and sends it, so that a tracker
that fails or hangs neither stops nor slows the run, and a finished run can be sent later by the same code.

    tracker.py      what a tracker is given, and what it must do; the registry
    progress.py     how much of a run a tracker has, in the run's folder
    sender.py       reads a run folder and sends what is new
    results.py      sends the results of a benchmark or a compression
    follower.py     the process that sends while a run trains
    trackio.py, wandb.py, mlflow.py, tensorboard.py, swanlab.py, webhook.py     a tracker each

Another package's tracker is found through the entry-point group `preheat.trackers`:

    [project.entry-points."preheat.trackers"]
    mine = "my_package.my_tracker"

A module that is not installed is named with `preheat --plugin`.
"""
