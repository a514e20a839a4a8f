"""The planner's input as data: models, accelerators, workloads, parallel layouts, calibrated constants."""
