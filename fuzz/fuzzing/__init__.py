"""Fuzz targets: what a file or a request of a stranger can do to minifloat, tried with random input.

    target.py      what a target is, and the outcome of one input
    mutation.py    changes of JSON values and of safetensors headers
    small.py       the small checkpoints whose files are changed
    headers.py     safetensors files             -> Checkpoint.open, every tensor, and the safetensors library
    configs.py     config.json                   -> inspect, check, plan, quantize --dry-run, the engine
    recipes.py     scheme, layout, overrides ... -> quantize, whose output has to open
    statistics.py  files of `calibrate`          -> read_stats, the Hessians of a layer
    journals.py    work folders                  -> quantize, which resumes to the same bytes or refuses
    requests.py    requests of the API           -> the application and an engine, without sockets
    connections.py raw bytes of a connection     -> the protocol of the server, without sockets

`../run.py` runs them. An input passes if the target returns or raises a `MinifloatError` within its seconds of
processor time; the targets of the server also hold every answer to its status and form.
"""
