# Runs the step of a Slurm job, and puts the job back into the queue where the same command will go on. The *.sbatch scripts source it.
#
# run_and_requeue SIGNAL COMMAND...    never returns: ends with the command's exit code, or with 0 if the job is queued again
#
#   Slurm's warning before the time limit (SIGUSR1)    SIGNAL goes to the command, which saves and ends; queued again
#   preempted, and the command has saved and ended     queued again
#   exit code 2 or 3 (refused, wrong numbers)          not queued again: it would end there again
#   any other failure                                  queued again if the run has saved since it started, or was its first attempt
#   the whole job killed (a lost node, preemption)     Slurm queues it again by itself, because of --requeue

latest_checkpoint() {
    cat "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" 2>/dev/null || true
}

# was_preempted SINCE: a time like 2026-01-31T23:59:59, as Slurm writes it.
was_preempted() {
    local at
    at=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null | grep -o 'PreemptTime=[0-9][0-9T:-]*' | cut -d= -f2) || return 1
    [[ ! $at < $1 ]]
}

run_and_requeue() {
    local signal=$1 before began step code warned= interrupted= why=
    shift
    before=$(latest_checkpoint)
    began=$(date +%Y-%m-%dT%H:%M:%S)
    "$@" &
    step=$!
    trap 'echo "requeue.sh: the time limit is near; ending the step to queue the job again"
          warned=yes interrupted=yes
          kill -"$signal" "$step" 2>/dev/null || true' USR1
    while :; do
        interrupted= code=0
        wait "$step" || code=$?
        [ -n "$interrupted" ] || break  # a signal ends wait, not the step
    done
    if [ -z "${SLURM_JOB_ID:-}" ] || [ "$code" = 2 ] || [ "$code" = 3 ]; then
        exit "$code"
    elif [ -n "$warned" ]; then
        why="stopped before the time limit"
    elif [ "$code" = 0 ]; then
        ! was_preempted "$began" || why="stopped, as it was preempted"
    elif [ "$(latest_checkpoint)" != "$before" ] || [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
        why="failed with exit code $code"
    fi
    [ -n "$why" ] || exit "$code"
    echo "requeue.sh: the run $why; it goes on from ${CHECKPOINT_PATH}: job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
