"""The conformance suite: every test takes a target (op, language, device) and finds its cases in `cases/`."""
