#!/usr/bin/env bash
# Installs this clone on every worker of a Cloud TPU and runs commands there, in the project and zone of `gcloud config`.
#
#   train/launch.sh NAME install        sends the last commit and installs it, with Python 3.12, on all workers
#   train/launch.sh NAME run COMMAND    starts a command on all workers; it goes on if this machine disconnects
#   train/launch.sh NAME log [WORKER]   follows the output of a worker, by default the first, 0; Ctrl-C ends only this
#   train/launch.sh NAME stop           stops the command on all workers; training saves a checkpoint first
#   train/launch.sh NAME one COMMAND    runs a command on one chip of the first worker, without waiting for the others
set -euo pipefail
ONE_CHIP="env TPU_VISIBLE_CHIPS=0 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_PROCESS_BOUNDS=1,1,1 JAX_NUM_PROCESSES=1"
INSIDE='cd ~/treeflash && export PATH="$PWD/.venv/bin:$PATH"'

if [ $# -lt 2 ]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
  exit 2
fi
name=$1 action=$2
shift 2
command=$([ $# -eq 0 ] || printf '%q ' "$@")

on() { # WORKERS COMMAND
  gcloud compute tpus tpu-vm ssh "$name" --worker="$1" --command="$2"
}

case $action in
  install)
    folder=$(mktemp -d)
    git clone --quiet --depth 1 "file://$(cd "$(dirname "$0")/.." && pwd)" "$folder/treeflash"
    tar -czf "$folder/treeflash.tar.gz" -C "$folder" treeflash
    gcloud compute tpus tpu-vm scp "$folder/treeflash.tar.gz" "$name:" --worker=all
    on all "rm -rf treeflash && tar -xzf treeflash.tar.gz && curl -LsSf https://astral.sh/uv/install.sh | sh &&
      cd treeflash && ~/.local/bin/uv venv --quiet --python 3.12 &&
      ~/.local/bin/uv pip install --quiet --editable '.[tpu,train,gcs,tensorboard]'"
    ;;
  run)
    whole=$(printf '%q' "trap : TERM; $command; echo \"ended, exit status \$?\"") # trap: stop is for the command
    on all "$INSIDE && { nohup bash -c $whole > run.log 2>&1 < /dev/null & } && echo started"
    ;;
  one) on 0 "$INSIDE && $ONE_CHIP $command" ;;
  log) on "${1:-0}" "tail -n +1 -f treeflash/run.log" ;;
  stop) on all "pkill -TERM -f '[p]ython -m train' || true" ;;
  *) echo "error: got $action, expected install, run, log, stop or one" >&2 && exit 2 ;;
esac
