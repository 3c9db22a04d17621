"""The directory: signed, expiring records of nodes over a Kademlia DHT. A hint, never an authority."""
