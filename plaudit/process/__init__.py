"""Child processes: how they start, talk in frames, show that they live, and end. No knowledge of models lives here."""
