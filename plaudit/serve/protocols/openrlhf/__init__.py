"""OpenRLHF's and slime's remote reward protocols."""
