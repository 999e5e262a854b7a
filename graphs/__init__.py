"""Captures any callable at given shapes: buffers, keys, replay."""

if __name__ != "midstream.graphs":
    raise ImportError(
        "import midstream.graphs, not graphs: this folder is the source of midstream.graphs"
    )
