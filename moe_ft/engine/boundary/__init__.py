"""The boundary log: what a rank sends to other pipeline stages, kept in host memory."""
