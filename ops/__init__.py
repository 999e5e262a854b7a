"""What every device operation means: reference, kernel, launcher, registration."""

if __name__ != "midstream.ops":
    raise ImportError("import midstream.ops, not ops: this folder is the source of midstream.ops")
