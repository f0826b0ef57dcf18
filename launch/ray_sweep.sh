#!/bin/bash
# A sweep as a job of a Ray cluster. Edit the lines marked with EDIT, then run this where `ray` is installed: ./ray_sweep.sh
# The study lies on a file system that all nodes share. Run it again after whatever happened: the study goes on.
set -euo pipefail

# EDIT: the head's job server, and the token of the cluster (~/.ray/auth_token, made by `ray get-auth-token --generate`).
server=http://HEAD:8265
export RAY_AUTH_MODE=token
# EDIT: where things are, by paths that hold on all nodes.
python=/shared/venv/bin/python
sweep=/shared/sweeps/sweep.yaml
data=/shared/data
study=/shared/studies/one

# EDIT: how many trials, how many at once, and what each of them has.
exec ray job submit --address "$server" --no-wait -- \
    "$python" -m roxxel_dist sweep --ray_address auto \
    --sweep_config "$sweep" --data_path "$data" --study "$study" \
    --count 50 --workers 8 --gpus_per_trial 1

# Afterwards: `ray job logs ID --follow`, `ray job stop ID` (trials save and leave), `roxxel-dist report /shared/studies/one`.
