from labkit.answers import Edit

_READ = "        y[t] = h @ C[t] + D[:, None] * x[t]\n"
_FADED = "        faded = torch.exp(dt[t] * A)[:, None, None] * h\n"

WRONG = [
    Edit(_FADED, f"{_READ}{_FADED}", ("+ (dt[t][:, None] * x[t])[:, :, None] * B[t]\n" + _READ,
         "+ (dt[t][:, None] * x[t])[:, :, None] * B[t]\n"),
         mistake="A token reads the state after it has written: y_t is of h_t, not of the state before."),
    Edit(" + D[:, None] * x[t]", "", mistake="D x_t is missing: the path around the state."),
    Edit("D[:, None] * x[t]", "x[t]", mistake="The path around the state has a factor: D x_t."),
    Edit("D[:, None] * x[t]", "D[:, None] * dt[t][:, None] * x[t]",
         mistake="The path around the state has no dt in it: D x_t."),
    Edit("torch.exp(dt[t] * A)", "torch.exp(-dt[t] * A)",
         mistake="A is below 0 already: e^(dt A) is below 1, and a state fades."),
    Edit("torch.exp(dt[t] * A)", "torch.exp(A)", mistake="The decay depends on the token: e^(dt_t A)."),
    Edit("(dt[t][:, None] * x[t])", "x[t]", mistake="What a token writes is dt_t x_t B_t^T: dt counts there, too."),
    Edit("torch.exp(dt[t] * A)", "(1 + dt[t] * A)",
         mistake="1 + dt A is near e^(dt A) for a small dt alone: the decay is the exponential."),
    Edit("h = faded + (dt[t]", "h = torch.exp(dt[t] * A)[:, None, None] * (h + (dt[t]", ("* B[t]\n", "* B[t])\n"),
         mistake="The token's own part does not fade at its own step: first the state fades, then the token writes."),
    Edit("h @ C[t]", "h @ B[t]", mistake="A token writes at B and reads at C."),
    Edit("y = torch.empty_like(x)", "y, h = torch.empty_like(x), torch.zeros_like(h)",
         mistake="The state before the first token is the argument h, and need not be zeros."),
    Edit(_FADED, "        h *= torch.exp(dt[t] * A)[:, None, None]\n", ("h = faded +", "h +="),
         told="changes its input `h`"),
]


# %% right: by einsum, a list of outputs
import torch

def recurrence(x, dt, A, B, C, D, h):
    out = []
    for xt, dtt, Bt, Ct in zip(x, dt, B, C):
        h = torch.einsum("h,hpn->hpn", (dtt * A).exp(), h) + torch.einsum("h,hp,n->hpn", dtt, xt, Bt)
        out.append(torch.einsum("hpn,n->hp", h, Ct) + torch.einsum("h,hp->hp", D, xt))
    return torch.stack(out), h


# %% right: a copy of the state, changed in place
import torch

def recurrence(x, dt, A, B, C, D, h):
    h, y = h.clone(), x * D.view(1, -1, 1)
    decays, writes = (dt * A).exp(), dt.unsqueeze(-1) * x
    for t in range(x.shape[0]):
        h.mul_(decays[t].view(-1, 1, 1)).add_(writes[t].unsqueeze(-1) * B[t])
        y[t] += (h * C[t]).sum(-1)
    return y, h


# %% right: head by head, the states kept
import torch

def recurrence(x, dt, A, B, C, D, h):
    ys, lasts = [], []
    for i in range(len(A)):
        state, of = h[i], []
        for t in range(len(x)):
            state = torch.exp(A[i] * dt[t, i]) * state + dt[t, i] * torch.outer(x[t, i], B[t])
            of.append(torch.mv(state, C[t]) + D[i] * x[t, i])
        ys.append(torch.stack(of))
        lasts.append(state)
    return torch.stack(ys, 1), torch.stack(lasts)


# %% right: the sum over earlier tokens, written out
import torch

def recurrence(x, dt, A, B, C, D, h):
    rows = []
    for i in range(len(x)):
        state = torch.exp(dt[: i + 1].sum(0) * A)[:, None, None] * h
        for j in range(i + 1):
            left = torch.exp(dt[j + 1 : i + 1].sum(0) * A) * dt[j]
            state = state + left[:, None, None] * x[j][:, :, None] * B[j]
        rows.append(state @ C[i] + D[:, None] * x[i])
    return torch.stack(rows), state
