"""Where drafts pay in batches: method by batch size by context, measured, beside what the step costs predict."""
