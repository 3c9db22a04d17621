"""The directory as the daemon sees it: messages to the child that joins the DHT, its client, the records' layout."""
