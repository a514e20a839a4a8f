"""Questions and answers: where questions come from, how an answer is read, when two are the same, the vote."""
