"""Reads the file of an offline run of wandb: the records of its log, as wandb's own messages.

wandb has no public reader. The file has a header of 7 bytes, then blocks of 32 KiB with the frames of a LevelDB log:
checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last), data.
"""

import json
import struct

BLOCK, HEADER, FRAME = 32768, 7, 7


def records(file):
    """Yield the records of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    data, at, held = file.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + FRAME <= len(data):
        left = BLOCK - at % BLOCK
        if left < FRAME:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0:  # the rest of the block is empty
            at += left
            continue
        held += data[at + FRAME : at + FRAME + length]
        at += FRAME + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(held)
            held = b""
            yield record


def history(file):
    """Return the run's id, its name, its project, and {wandb's step: values}."""
    run, rows = None, {}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        if kind == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            assert row["_step"] not in rows
            rows[row["_step"]] = row
    return run.run_id, run.display_name, run.project, rows
