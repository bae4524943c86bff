"""Observers of a run, which change nothing in it.

    monitor                 all of them behind one interface
    training_log            the log lines that scripts parse
    writers                 TensorBoard, wandb, a JSONL file
    profiler                traces of steps, and memory histories
    health_files            a heartbeat in JSON, and numbers for Prometheus
    tensor_statistics       --inspect
    straggler_detector, cpu_contention    slow ranks; cores that others use
    long_task_progress           a line every few seconds of long silent work

To send a run's numbers elsewhere: a class in `writers`.
"""
