"""Questions and answers: loading questions, extracting answers, comparing them, and the vote."""
