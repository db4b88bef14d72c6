"""The processes of a job: how they start, agree on calls, and exchange arrays."""
