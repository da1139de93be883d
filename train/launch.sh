#!/usr/bin/env bash
# Installs this clone on every worker of a Cloud TPU and runs commands there, in the project and zone of `gcloud config`.
#
#   train/launch.sh NAME install          sends the last commit and installs it, with Python 3.12, on all workers; other
#                                         files there, such as runs, logs and results, are kept
#   train/launch.sh NAME run COMMAND      starts a command on all workers; it goes on if this machine disconnects
#   train/launch.sh NAME status           shows for every worker whether its run is alive or has ended, and its last line
#   train/launch.sh NAME log [--worker=N] follows the output of a worker, by default the first, 0; Ctrl-C ends only this
#   train/launch.sh NAME stop             stops the command on all workers; training saves a checkpoint first
#   train/launch.sh NAME one COMMAND      runs a command on the first worker and its four chips, without the others
set -euo pipefail
# For libtpu, the first worker is the whole slice.
ALONE="env TPU_VISIBLE_CHIPS=0,1,2,3 TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 TPU_PROCESS_BOUNDS=1,1,1 JAX_NUM_PROCESSES=1"
INSIDE='cd ~/treeflash && export PATH="$PWD/.venv/bin:$PATH"'
# A run holds the lock of its worker until its last process has ended, however it ends.
IDLE='[ ! -e ~/treeflash/run.lock ] || flock -n ~/treeflash/run.lock true'
STATUS='state=alive
if [ ! -e run.log ]; then state="no run yet"; elif flock -n run.lock true; then
  state=$(tail -n 1 run.log | grep "^ended, exit status" || echo "ended without an exit status (killed, or restarted)")
fi
echo "$(hostname): $state; last line: $(grep -sv "^ended, exit status" run.log | tail -n 1)"'

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

fail() {
  echo "error: $1" >&2
  exit 2
}

case $action in
  run | one) [ -n "$command" ] || fail "got no command, expected one after $action" ;;
esac
case $action in
  run | install)
    on all "$IDLE || { echo \"\$(hostname): a run is alive\" >&2; exit 1; }" ||
      fail "got a run that is alive or a worker that did not answer, expected idle workers; see: $0 $name status"
    ;;
esac
case $action in
  install)
    folder=$(mktemp -d)
    git clone --quiet --depth 1 "file://$(cd "$(dirname "$0")/.." && pwd)" "$folder/treeflash"
    tar -czf "$folder/treeflash.tar.gz" -C "$folder" treeflash
    gcloud compute tpus tpu-vm scp "$folder/treeflash.tar.gz" "$name:" --worker=all
    # Files of the commit installed before are removed, all others kept.
    on all "{ [ ! -d treeflash/.git ] || (cd treeflash && git ls-files -z | xargs -0 rm -f && rm -rf .git); } &&
      tar -xzf treeflash.tar.gz && python3 -m pip install --quiet --user uv &&
      cd treeflash && ~/.local/bin/uv venv --quiet --clear --python 3.12 &&
      ~/.local/bin/uv pip install --quiet --editable '.[tpu,train,gcs,tensorboard]'"
    ;;
  run)
    whole=$(printf '%q' "trap : TERM; $command; echo \"ended, exit status \$?\"") # trap: stop is for the command
    on all "$INSIDE && { nohup flock -n run.lock bash -c $whole > run.log 2>&1 < /dev/null & } && echo started"
    ;;
  status) on all "$INSIDE && { $STATUS; }" ;;
  one) on 0 "$INSIDE && $ALONE $command" ;;
  log)
    worker=${1:-0}
    on "${worker#--worker=}" "tail -n +1 -f treeflash/run.log"
    ;;
  stop) on all "fuser -k -TERM treeflash/run.lock || true" ;; # the processes of the run
  *) fail "got $action, expected install, run, status, log, stop or one" ;;
esac
