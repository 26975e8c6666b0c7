"""The metrics of `metrics.jsonl`: name -> unit and meaning. No torch.

A row has `step` and a name a number; groups stand in front of a slash. Trackers and reports take the same names.
"""

METRICS = {
    "step": "count; optimizer steps done, skipped ones included",
    "kl": "nats; baseline of kto: how much likelier answers to other prompts became, at least 0",
    "train/loss": "nats per target; cross entropy summed over all targets of the global batch, divided by their "
    "number; under a preference objective, the mean of that objective",
    "train/grad_norm": "number; norm of the whole gradient, before clipping",
    "train/learning_rate": "number; rate of this step",
    "train/tokens_seen": "count; input tokens since the run began, without padding",
    "train/skipped_steps": "count; steps since the run began whose loss or gradient was not finite",
    "perf/tokens_per_second": "tokens/s; input tokens of this step, over all devices",
    "perf/tokens_per_second_per_device": "tokens/s; the same, divided by the number of devices",
    "perf/tflops_per_device": "TFLOP/s; model FLOPs of this step, with causal attention halved and no recompute",
    "perf/mfu_pct": "%; these FLOPs against the peak of the device; null if the peak is unknown",
    "perf/matmul_pct": "%; these FLOPs against the large matmuls that fivefold calibrate measured; CPUs with "
    "layout.hardware alone",
    "perf/step_seconds": "s; wall clock of this step",
    "perf/data_wait_pct": "%; part of the step that waited for rows",
    "perf/elapsed_seconds": "s; time since the run began, summed over its starts",
    "memory/peak_gib": "GiB; allocated at the peak since this start, the largest of all ranks; on a CPU resident "
    "memory, less that before the model was built",
    "memory/peak_reserved_gib": "GiB; reserved by the caching allocator at the peak, the largest of all ranks; "
    "GPUs alone",
    "eval/loss": "nats per target; loss on the held-out rows, at steps with an evaluation",
    "eval/best": "unit of eval.metric; the best value of it at any evaluation so far",
    "eval/best_step": "count; the step of that evaluation, of equal ones the first",
    "eval/kl": "nats; kl on the held-out rows",
    "moe/aux_loss": "number; loss for uneven load of experts, before its coefficient",
    "moe/z_loss": "number; loss for large router logits, before its coefficient",
    "moe/load_max": "number; tokens of the busiest expert over the mean of its layer, the largest of all layers",
    "moe/idle_pct": "%; experts without a token",
    "moe/load": "counts, a list for each layer; tokens that each router picked each expert for, dropped ones included",
    "moe/dropped": "count; picks beyond balance.capacity_factor",
    "moe/dropped_pct": "%; part of all picks that was dropped",
    "rewards/chosen": "number; beta times the log-probability of chosen answers, less that of the reference "
    "where there is one; mean over pairs",
    "rewards/rejected": "number; the same of rejected answers",
    "rewards/margins": "number; difference of the two, mean over pairs",
    "rewards/accuracies": "part of 1; pairs whose chosen answer has the larger reward",
    "logps/chosen": "nats; log-probability of chosen answers, mean over pairs; orpo and simpo: per token",
    "logps/rejected": "nats; the same of rejected answers",
}
METRICS |= {
    f"eval/{name}": f"{meaning}; on the held-out rows"
    for name, meaning in METRICS.items()
    if name.startswith(("rewards/", "logps/"))
}
