"""A run is observed; nothing here changes it.

monitor                                   all observers behind one interface
training_log                              the log lines that scripts parse
writers                                   TensorBoard, wandb, a JSONL file
torch_profiler                            traces of steps, and memory histories
heartbeat_and_prometheus_files            a heartbeat in JSON, and numbers for Prometheus
tensor_statistics                         --inspect
straggler_by_busy_time, cpu_contention    slow ranks; cores that other processes use
long_task_progress                        a line every few seconds of long silent work

To send a run's numbers elsewhere: a class in `writers`.
"""
