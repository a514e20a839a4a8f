"""One pure module per wire format: bodies to records and records to replies. No model, no I/O."""
