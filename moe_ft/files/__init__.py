"""Files and storage: private files on a node, directories on URLs, and waits for them."""
