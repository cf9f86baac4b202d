"""The conversation of the built-in proof: a page about how warmroute works, and two questions about it."""

DOCUMENT = """\
How a prompt finds a warm cache

A language model reads a prompt before it writes the first word of its answer. This reading is called prefill. For every
token of the prompt the model computes a key and a value in each of its layers and keeps them, because every later token
looks back at them. Together they are the KV cache of the prompt. Prefill is the expensive part of a long prompt: it
grows with the number of tokens, and a prompt of a few thousand tokens keeps a small machine busy for seconds.

Many prompts begin alike. All requests of one application share its instructions. All turns of one conversation share
the turns before them. All questions about one document share the document. The keys and values of a shared beginning
are the same each time, so a worker that has kept them does not have to compute them again. It starts to read where the
known beginning ends. This is prefix caching, and it turns seconds into a fraction of a second.

With one worker that is all there is to it. With several workers there is a question that the workers cannot answer
alone: which of them has kept the beginning of this prompt? A load balancer that takes turns sends the second question
of a conversation to a worker that has never seen the first one. The work is done twice, the memory is filled twice,
and the user waits. What is needed is a router that knows what every worker holds.

Blocks

A worker does not keep its cache as one long strip. It cuts the tokens of a prompt into blocks of equal size, sixteen
tokens in our default, and keeps each block wherever there is room. A table says which blocks belong to which request.
Two requests that begin alike point to the same blocks for their common beginning, and a count on each block says how
many requests use it. When the last of them has ended the block is not thrown away. It stays where it is, with its
contents, until the room is needed for something else. The block that was not used for the longest time goes first, and
never one on which a kept block still builds.

Names for blocks

To find a block again it needs a name. The name is a hash: a number computed from the tokens of the block and from the
name of the block before it. So the name stands for the block and for everything in front of it. Two blocks with the
same sixteen tokens have different names when what came before was different, and that is right, because their keys and
values differ as well. A prompt is turned into a list of names, one for each full block. The longest row of names, from
the first one on, that a worker holds is what it can skip. We call the length of this row the overlap.

Events

The router cannot look into the memory of a worker. Instead every worker tells what it does. When a block has been
filled it sends a message that says: stored, with the name of the block. When a block had to make room it sends another
one: removed. The messages travel over a small message broker, and the router that listens to them keeps an index: for
each name the set of workers that hold it. When a prompt arrives the router computes its names, walks through the index
from the first name on, and knows after some microseconds how much of the prompt each worker has kept.

Blocks that were filled by the answer count as well. The next turn of a conversation contains the answer of the turn
before, word by word, so the worker that wrote the answer holds that part too. Because such blocks are named and
announced like any others, the follow-up question finds nearly everything in place: the document, the first question,
and the answer to it. Only the new question has to be read.

Trust

Messages get lost. Workers are restarted. A broker goes away for a while and comes back. An index that believes
everything it has ever heard becomes wrong little by little, and nobody notices, because a wrong index does not fail. It
only makes every answer slower. So each message carries a number, one higher than the last, and a digest: a sum over all
the blocks that the worker holds at that moment. The router keeps the same sum over what it believes. When a number is
missing or the sums disagree it knows at once that its picture of this worker is not exact. It asks the worker for what
it missed, builds a new picture beside the old one, and swaps them in one step. Until then it goes on with the old
picture, which is still better than none.

A heartbeat once a second says who is there, how much work is waiting, and again the number and the digest. A worker
that stays silent for three beats gets no new prompts. When it comes back with an empty cache the router knows that too,
because the new life of the worker has a new epoch, and names that were announced in an old one no longer count.

Choosing

The worker with the longest overlap is not always the right one. If everybody asks about the same document, one worker
would get all the work while the others sleep. So the router weighs two costs in the same unit: the tokens that a worker
would still have to read for this prompt, and the tokens that it has already promised to read for others. The worker
with the smallest sum wins. A warm cache attracts, a long queue repels, and a popular document spreads to a second
worker just when the first one has enough to do. Every answer tells in its headers which worker was chosen, how many
blocks overlapped, and why.
"""
"""Written for this proof; some 1,000 words, so that the shared prefix is well above 1,000 tokens."""

SYSTEM = "You are a helpful assistant. Answer questions about this page in one or two short sentences.\n\n" + DOCUMENT

FIRST_QUESTION = "What is prefix caching, and why does it save time?"

FOLLOW_UP = "And why does it matter which worker gets the next question?"
