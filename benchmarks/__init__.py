"""What Canary costs on a GPU, op by op, beside SGLang's built-in canary in the same process: ``python -m benchmarks``.

Files in the order of the data: `layouts` (where bytes lie), `cases` (the registry), `setting` (a case's pool, records
and batches on the device), `equality` (no speed without it), `timing`, `gather` (a floor), `peer` (SGLang's built-in),
`measure` (one case), `step` (whole hooks, host time, launches, memory, curves), `report` (table, JSON, markdown, plot).
"""
