"""Trainings on other machines: a Slurm cluster, a machine reached by SSH, or a machine that SkyPilot rents.

    package   the job's config and files, with the paths that they have there
    script    the job as text: job.sh (which is the sbatch script too), and SkyPilot's task.yaml
    machine   run a shell script there, over ssh or here, and explain why it failed
    handle    what is remembered here of a job there
    submit    check there, send, verify, start
    control   status, follow, cancel, start again
    fetch     bring the run folder back, verified

A job there is a folder of its own, and what goes along keeps the last part of its path:

    NAME/  .lora-fp8-job  config.toml  data/1/photos/  cache/  runs/NAME/  job.sh  log.txt  exit

`job.sh` decides what to do by what is in the run folder, so that starting it again always continues. The machine there
needs bash, GNU tar and coreutils, and this program. This package does not import torch.
"""
