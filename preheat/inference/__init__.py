"""Opens a run, a folder or an adapter; generates text and chats."""
