"""模型：形状、因果、掩码、缓存、generate 当作库来用。"""
import pytest
import torch

from gpt import GPT, GPTConfig, sample


def random_ids(batch, length, vocab_size=50, seed=0):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_shapes_and_loss(tiny):
    tiny.eval()
    idx = random_ids(3, 7)
    logits, loss = tiny(idx)
    assert logits.shape == (3, 7, 50) and loss is None
    again, loss = tiny(idx, targets=idx)
    assert torch.equal(again, logits)
    picked = torch.log_softmax(logits, -1).gather(-1, idx[..., None])
    assert torch.allclose(loss, -picked.mean())


@torch.no_grad()
def test_first_loss_is_that_of_guessing():
    model = GPT(GPTConfig(vocab_size=1000, n_embd=32))
    loss = model(random_ids(4, 100, 1000), random_ids(4, 100, 1000, seed=1))[1]
    assert abs(loss.item() - torch.tensor(1000.0).log().item()) < 0.1


@torch.no_grad()
def test_a_later_character_changes_no_earlier_logit(tiny):
    tiny.eval()
    idx = random_ids(1, 16)
    before = tiny(idx)[0]
    for t in range(1, 16):
        changed = idx.clone()
        changed[0, t] = (changed[0, t] + 1) % 50
        after = tiny(changed)[0]
        assert torch.equal(after[:, :t], before[:, :t]), t
        assert not torch.allclose(after[:, t], before[:, t]), t


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(16,), (1,) * 16, (5, 11), (1, 15), (15, 1), (3, 1, 4, 1, 5, 2), (8, 8)])
def test_whole_equals_in_pieces_with_a_cache(tiny, sizes):
    tiny.eval()
    idx = random_ids(2, 16)
    caches, start, pieces = [{}, {}], 0, []
    for size in sizes:
        pieces.append(tiny(idx[:, start:start + size], caches=caches, start=start)[0])
        start += size
        assert all(cache[name].shape == (2, 2, start, 8) for cache in caches for name in "kv")
    assert torch.allclose(torch.cat(pieces, dim=1), tiny(idx)[0], atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])  # 窗口是 16：写着写着会超过，提示词也可以更长
@pytest.mark.parametrize("options", [
    {}, {"temperature": 0}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 2.0, "top_k": 10, "top_p": 0.9}])
def test_cached_equals_uncached(tiny, length, options):
    for seed in range(3):
        prompt, texts = random_ids(2, length, seed=seed), []
        for use_cache in (True, False, True):
            torch.manual_seed(seed)
            texts.append(tiny.generate(prompt, 30, use_cache=use_cache, **options))
        assert texts[0].shape == (2, length + 30) and torch.equal(texts[0][:, :length], prompt)
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_a_batch_is_its_rows(tiny):
    prompts = random_ids(3, 4)
    together = tiny.generate(prompts, 20, temperature=0)
    for row, prompt in zip(together, prompts):
        assert torch.equal(row[None], tiny.generate(prompt[None], 20, temperature=0))


def test_beyond_the_window_only_the_last_characters_count(tiny):
    prompt = random_ids(1, 40)
    short = tiny.generate(prompt[:, -16:], 5, temperature=0)
    assert torch.equal(tiny.generate(prompt, 5, temperature=0)[:, -21:], short)


def test_stop(tiny):
    prompt = random_ids(4, 3)
    free = tiny.generate(prompt, 30, temperature=0)
    stop = free[0, 6].item()
    text = tiny.generate(prompt, 30, temperature=0, stop=stop)
    for row, whole in zip(text, free):
        ends = (whole[3:] == stop).nonzero()
        length = 3 + (ends[0].item() + 1 if len(ends) else 30)
        assert torch.equal(row[:length], whole[:length])  # 写到 stop 为止和不停时一样
        assert (row[length:] == stop).all()  # 之后用 stop 补齐
    alone = tiny.generate(prompt[:1], 30, temperature=0, stop=stop)
    first = (free[0, 3:] == stop).nonzero()[0].item()
    assert alone.shape == (1, 3 + first + 1)  # 都写完了就不再写
    with_stop_in_prompt = torch.tensor([[stop, 1, 2]])
    assert tiny.generate(with_stop_in_prompt, 1, temperature=0, stop=stop).shape == (1, 4)


def test_generate_neither_trains_nor_disturbs(tiny):
    weights = [p.clone() for p in tiny.parameters()]
    tiny.train()
    torch.manual_seed(1)
    first = tiny.generate(random_ids(1, 3), 20)
    assert tiny.training and all(module.training for module in tiny.modules())
    tiny.eval()
    torch.manual_seed(1)
    assert torch.equal(first, tiny.generate(random_ids(1, 3), 20))  # 训练状态下也没有丢弃
    assert not tiny.training and not first.requires_grad
    assert all(torch.equal(p, w) and p.grad is None for p, w in zip(tiny.parameters(), weights))
    tiny.train()
    with pytest.raises(ValueError):
        tiny.generate(random_ids(1, 3), 5, temperature=-1)
    assert tiny.training
    with torch.inference_mode():
        torch.manual_seed(1)
        assert torch.equal(first, tiny.generate(random_ids(1, 3), 20))


def test_nothing_to_write(tiny):
    prompt = random_ids(2, 3)
    assert torch.equal(tiny.generate(prompt, 0), prompt)


@pytest.mark.parametrize("idx", [
    torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long), torch.tensor([1, 2]), torch.tensor([[1.0]]),
    torch.tensor([[50]]), torch.tensor([[-1]]), [[1]], torch.zeros(1, 2, 3, dtype=torch.long), torch.tensor([[True]])])
def test_bad_prompt(tiny, idx):
    with pytest.raises(ValueError, match="idx"):
        tiny.generate(idx, 5)


@pytest.mark.parametrize("name, value", [
    ("temperature", -1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"), ("top_k", 0),
    ("top_k", -5), ("top_k", 2.5), ("top_p", 0), ("top_p", 1.5), ("top_p", -0.1), ("top_p", float("nan")),
    ("max_new_tokens", -1), ("max_new_tokens", 1.5), ("stop", 50), ("stop", -1)])
def test_bad_argument_is_named(tiny, name, value):
    arguments = {"max_new_tokens": 5, name: value}
    with pytest.raises(ValueError) as error:
        tiny.generate(random_ids(1, 3), **arguments)
    assert name in str(error.value) and repr(value) in str(error.value)


def test_too_long_for_forward(tiny):
    with pytest.raises(ValueError, match="block_size=16.*17"):
        tiny(random_ids(1, 17))
    with pytest.raises(ValueError, match="block_size=16.*18"):
        tiny(random_ids(1, 3), start=15)


@pytest.mark.parametrize("name, value", [
    ("n_embd", 130), ("n_embd", 0), ("block_size", 0), ("vocab_size", 0), ("n_layer", 0), ("n_head", -1), ("dropout", 1.0),
    ("dropout", -0.1), ("block_size", 12.5)])
def test_bad_config(name, value):
    with pytest.raises(ValueError) as error:
        GPTConfig(**{name: value})
    assert name in str(error.value) and repr(value) in str(error.value)


def test_a_tiny_model_learns_one_batch_by_heart():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=30, n_layer=2, n_head=2, n_embd=32, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = random_ids(4, 17, 30)
    for _ in range(100):
        loss = model(x[:, :-1], x[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.0 < 2.0 < torch.tensor(30.0).log()  # 第一个字猜不准，其余的背下来了
    assert torch.equal(model.generate(x[:, :2], 15, temperature=0)[:, 2:], x[:, 2:])


def test_temperature_zero_is_argmax():
    logits = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, temperature=0), logits[:, -1].argmax(-1, keepdim=True))
