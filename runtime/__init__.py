"""Requests, pages, prefix cache, scheduler, step, engine, command line."""

if __name__ != "midstream.runtime":
    raise ImportError(
        "import midstream.runtime, not runtime: this folder is the source of midstream.runtime"
    )
