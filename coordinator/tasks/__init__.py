"""Task sources that the organizer alone has: files, functions of his own, `verifiers`, pools of several, chats.

Only the grading child imports what is here, and nothing of it reaches a node: leases carry the prompts' token ids.
"""
