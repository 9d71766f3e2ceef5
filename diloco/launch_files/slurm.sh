#!/usr/bin/env bash
#SBATCH --job-name=diloco
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@900
# The defaults above can be overridden on sbatch's command line. --signal asks the island to leave after its round 900 s
# before the job's time is over. This time must be longer than a round.
set -euo pipefail

usage() {
    cat <<'TEXT'
Runs one island as one SLURM job. When a rank dies, all are started again: by `diloco launch` on one node, by torchrun
on several. Then torchrun's store listens on the first node, and any machine that reaches it can run code in the island:
close that node's ports to all but the island's own nodes (docs/operating.md).

    DILOCO_CONFIG=run.yaml DILOCO_INDEX=0 DILOCO_BOOTSTRAP=ADDRESS[,ADDRESS...] \
        sbatch --nodes 1 --gpus-per-node 8 --time 24:00:00 slurm.sh [section.key=value ...]
    (the same variables) slurm.sh --dry-run [section.key=value ...]    prints the command

required    DILOCO_CONFIG       the run's YAML file, the same on every cluster
            DILOCO_INDEX        island.index: 0, 1, ...; a different one for each job
            DILOCO_BOOTSTRAP    the address that `diloco bootstrap` printed; several separated by commas
optional    DILOCO_RANKS        ranks per node; default: the node's GPUs in this job
            DILOCO_RUN_DIR      folder of runs, on a file system shared by all nodes; default: runs
            DILOCO_PYTHON       default: .venv/bin/python
            DILOCO_RESTARTS     how often the island is started again; default: 3
            DILOCO_PORT         several nodes: port of their rendezvous; default: derived from the job id

When the job's time runs out, the island leaves after its round and the job is queued again. It then takes the state of
the other islands and continues. scancel --batch --signal=USR2 JOB does the same at any time.
TEXT
}

fail() {
    echo "slurm.sh: $1" >&2
    echo "slurm.sh: see $0 --help" >&2
    exit 2
}

number() {
    [[ ${!1} =~ ^[0-9]+$ ]] || fail "$1: got '${!1}'; allowed: a whole number"
}

first_node() {
    scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1
}

dry=""
case ${1:-} in
    --help | -h) usage; exit 0 ;;
    --dry-run) dry=yes; shift ;;
esac
[[ -n $dry || -n ${SLURM_JOB_ID:-} ]] || fail "this is not a SLURM job; start it with sbatch, or use --dry-run"
for name in DILOCO_CONFIG DILOCO_INDEX DILOCO_BOOTSTRAP; do
    [[ -n ${!name:-} ]] || fail "$name is not set"
done
DILOCO_RANKS=${DILOCO_RANKS:-${SLURM_GPUS_ON_NODE:-1}}
DILOCO_RESTARTS=${DILOCO_RESTARTS:-3}
job=${SLURM_JOB_ID:-0}
nodes=${SLURM_NNODES:-1}
DILOCO_PORT=${DILOCO_PORT:-$((20000 + job % 10000))}
for name in DILOCO_INDEX DILOCO_RANKS DILOCO_RESTARTS DILOCO_PORT; do number "$name"; done
python=${DILOCO_PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || fail "DILOCO_PYTHON: there is no '$python'; run scripts/setup, or set it"
runs=${DILOCO_RUN_DIR:-runs}

values=("$@" "island.index=$DILOCO_INDEX" "island.ranks=$((nodes * DILOCO_RANKS))" "island.run_dir=$runs"
    "island.bootstrap=[$DILOCO_BOOTSTRAP]")
# Reports errors in the config before the job waits for GPUs.
read_config='
import sys
from diloco.config.schema import load_config
from diloco.errors import ConfigError
try:
    config = load_config(sys.argv[2], sys.argv[3:])
    print(config.name, config.for_island(int(sys.argv[1])).label)
except ConfigError as error:
    sys.exit(f"error: {error}")'
facts=$("$python" -c "$read_config" "$DILOCO_INDEX" "$DILOCO_CONFIG" "${values[@]}") || exit 2
read -r run name <<<"$facts"
island=$runs/$run/$name

head=$(hostname)
[[ -z ${SLURM_JOB_NODELIST:-} ]] || head=$(first_node)
# Each node listens on its own address, where the others can reach it.
# shellcheck disable=SC2016
own='exec "$@" "island.listen_host=$(hostname -i | cut -d " " -f 1)"'
if ((nodes == 1)); then
    start=("$python" -m diloco launch --max-restarts "$DILOCO_RESTARTS")
else
    start=("$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$DILOCO_RANKS"
        --rdzv-backend c10d --rdzv-endpoint "$head:$DILOCO_PORT" --rdzv-id "diloco-$job-${SLURM_RESTART_COUNT:-0}"
        --max-restarts "$DILOCO_RESTARTS" -m diloco train)
fi
launch=(srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1
    bash -c "$own" diloco "${start[@]}" "$DILOCO_CONFIG" "${values[@]}")

if [[ -n $dry ]]; then
    printf '%q ' "${launch[@]}"
    printf '\non SIGUSR2: touch %q; then: scontrol requeue JOB\n' "$island/stop-after-round"
    exit 0
fi

# shellcheck disable=SC2329
ask_to_stop() {
    mkdir -p "$island"
    touch "$island/stop-after-round"
    echo "slurm.sh: the island is asked to stop after its round"
}
trap ask_to_stop USR2

# An earlier job that was killed before its round was over may have left this file.
rm -f "$island/stop-after-round"
"${launch[@]}" &
child=$!
status=0
wait "$child" || status=$?
# A signal ends only the wait, so wait again while the island runs.
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
# Requeue only if the island was asked to stop, not if the run is over or the island has failed.
if ((status == 0)) && grep -sF "**$name** left:" "$runs/$run/LOGBOOK.md" | tail -n 1 | grep -q 'asked to stop'; then
    scontrol requeue "$job"
fi
exit "$status"
