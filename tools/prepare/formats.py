"""What a row of a source is, by data.format. Asked here alone."""

import config
from tools.prepare.row_format import Texts


def row_format(data: config.Data) -> "Texts":
    """The format of the rows of one source."""
    if data.has_conversations:
        from tools.prepare.chat.rows import Conversations

        return Conversations(data)
    return Texts(data)
