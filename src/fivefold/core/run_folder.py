"""The files of a run folder, `runs/NAME`: name -> content. No torch."""

RUN_FILES = {
    "run.yaml": "the resolved run file: every key with its value; `fivefold train runs/NAME` reads it",
    "metrics.jsonl": "a row for each logged step, one JSON object a line",
    "samples.jsonl": "a line for each sample: step, prompt, text, and messages of a conversation; only with "
    "sample.prompts, messages or file",
    "history.jsonl": "a line for each start, its end, and events between: versions, machine, layout, data, schedule",
    "spread.json": "which rank holds what, what a step sends, when the slots of a pipeline ran; for fivefold report",
    "checkpoints/step-NNNNNN/": "a checkpoint; the newest checkpoint.keep are kept, and the best checkpoint.keep_best",
    "checkpoints/step-NNNNNN/manifest.json": "how every tensor is cut, and the size and checksum of each file",
    "checkpoints/step-NNNNNN/weight-RRRRR.safetensors": "slices of the weights that rank R wrote",
    "checkpoints/step-NNNNNN/optimizer-RRRRR.safetensors": "slices of the optimizer state that rank R wrote",
    "checkpoints/step-NNNNNN/run.yaml": "the resolved run file of that step",
    "checkpoints/step-NNNNNN/model/": "config, tokenizer, processors, licence: a Hugging Face folder without weights",
    "logs/rank-N.log": "output of rank N in the newest start; that of rank 0 goes to the terminal",
    "logs/failure-N.json": "why rank N ended: error, stacks, last collective; only after a failure",
    "logs/request.json": "what the launcher asked the workers to do",
    "hf/": "a Hugging Face folder of the last step, or of the best; only with checkpoint.export_hf",
    "tensorboard/": "events of TensorBoard; only with log.to: [tensorboard]",
    "report.html": "the page of fivefold report",
    "NAME.damaged": "lines of a .jsonl file that were damaged, set aside",
    "logs/round-N/": "logs and failures of one round of nodes; only with train.nodes",
    ".round-N/, checkpoints/.round-N/": "what the last round of nodes is about to write; only with train.nodes",
    ".nodes/": "where the nodes of a run meet; only with train.nodes",
    ".lock": "held by the run that writes to the folder; the system drops it when its owner ends",
}
