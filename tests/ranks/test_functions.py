"""Functions of torch on sharded tensors: values, shapes, dtypes and gradients are those of one
process.
"""

import warnings

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.ranks.test_whole_parameters import doubles

import bmtrain as bmt
from bmtrain.shard.slices import Slices

# x and y are matrices of one shape; x is sharded.
EXPRESSIONS = """
x.norm()|x.norm(1)|x.norm(dim=0)|x.norm(2,0)|x.norm(p=2,dim=(0,))|x.norm(p='fro')
x.norm(float('inf'))|x.norm(float('-inf'))|x.norm(0)|x.norm(2,-1,True)|x.norm(dim=-1,keepdim=True)
x.norm(dtype=torch.float64)|torch.norm(x)|torch.norm(x,1,1)|torch.linalg.norm(x)
torch.linalg.norm(x,dim=1)|torch.linalg.norm(x,ord=1)|torch.linalg.norm(x,ord=2)
torch.linalg.norm(x,'nuc')|torch.linalg.vector_norm(x)|torch.linalg.vector_norm(x,dim=1)
torch.linalg.vector_norm(x,3)|torch.linalg.vector_norm(x,dim=(0,1),keepdim=True)
torch.linalg.vector_norm(x,ord=float('inf'),dim=0)|torch.linalg.matrix_norm(x)
torch.linalg.matrix_norm(x,ord=1)|x.sum()|x.sum(0)|x.sum(dim=0)|x.sum(-1)|x.sum(dim=(0,1))
x.sum(dim=[])|x.sum(0,True)|x.sum(dtype=torch.float64)|torch.sum(x)|torch.sum(x,0)
torch.sum(x,dim=1,keepdim=True)|x.mean()|x.mean(0)|x.mean(dim=(0,))|x.mean(-1,keepdim=True)
torch.mean(x)|torch.mean(x,1)|x.mean(dtype=torch.float64)|x.std()|x.std(0)|x.std(unbiased=False)
x.var()|x.var(dim=0)|x.var(correction=0)|torch.var_mean(x)|torch.std_mean(x,dim=1)|x.max()
x.max(0)|x.max(dim=1)|x.min()|x.min(1)|x.amax()|x.amax(0)|x.amin(dim=(0,1))
x.amax(dim=0,keepdim=True)|torch.max(x)|torch.max(x,0)|torch.max(x,x*2)|torch.min(x,y)
torch.aminmax(x)|torch.aminmax(x,dim=0)|x.argmax()|x.argmax(0)|x.argmin(dim=1)|torch.argmax(x)
x.prod()|x.prod(0)|x.median()|x.median(0)|x.nanmedian()|x.mode(0)|x.kthvalue(2,0)|x.quantile(0.3)
x.quantile(0.3,dim=0)|torch.nanmean(x)|torch.nansum(x)|torch.nanquantile(x,0.5)|x.logsumexp(0)
x.cumsum(0)|x.cumsum(-1)|x.cumprod(0)|x.cummax(0)|torch.logcumsumexp(x,0)|x.softmax(0)
x.softmax(-1)|x.log_softmax(1)|torch.softmax(x,0)|torch.nn.functional.normalize(x)
torch.nn.functional.normalize(x,dim=0)|torch.nn.functional.layer_norm(x,x.shape[1:])|x.sort()
x.sort(0)|x.argsort()|x.topk(2,0)|torch.sort(x,descending=True)|torch.msort(x)|x.any()|(x>0).any()
(x>0).any(0)|(x>0).all()|(x>-9).all(dim=1)|x.isnan().any()|torch.isfinite(x).all()
torch.allclose(x,x)|torch.equal(x,x)|torch.isclose(x,y)|x.count_nonzero()|x.count_nonzero(0)
torch.count_nonzero(x)|(x>0).sum()|(x>0).sum(0)|(x>0).float().mean()|(x>0).nonzero()
torch.where(x>0)|torch.where(x>0,x,y)|torch.where(x>0,x,0.0)|x.where(x>0,y)|x[x>0]
x.masked_select(x>0)|torch.nonzero(x)|x.dist(y)|torch.dist(x,y,1)|torch.cdist(x,y)
torch.nn.functional.mse_loss(x,y)|torch.nn.functional.mse_loss(x,y,reduction='sum')
torch.nn.functional.l1_loss(x,y)|torch.nn.functional.smooth_l1_loss(x,y)
torch.nn.functional.cosine_similarity(x,y)|torch.nn.functional.cosine_similarity(x,y,dim=0)
torch.nn.functional.pairwise_distance(x,y)
torch.nn.functional.kl_div(x.log_softmax(0),y.softmax(0))|torch.nn.functional.huber_loss(x,y)|x.T
x.t()|x.transpose(0,1)|x.permute(1,0)|x.reshape(-1)|x.view(-1)|x.flatten()|x.unsqueeze(0)
x.squeeze()|x.expand(3,*x.shape)|x.repeat(2,1)|x.repeat_interleave(2)|x.roll(1)|x.flip(0)
x.rot90()|x.narrow(0,1,2)|x.select(0,1)|x.index_select(0,torch.tensor([1,0]))
x.gather(0,torch.zeros_like(x).long())|x.take(torch.tensor([1,3]))|x.chunk(2)|x.split(2)
x.unbind()|x.tril()|x.triu(1)|x.diagonal()|x.diag()|x.trace()|x.movedim(0,1)|x.unfold(0,2,1)|x[0]
x[...,0]|x[1:3]|x[None]|x[[0,2]]|x[-1,-1]|list(x)|x.tolist()|torch.stack([x,y])|torch.cat([x,y])
torch.cat([x,y],1)|torch.hstack([x,y])|torch.einsum('ij,kj->ik',x,y)|torch.einsum('ij->',x)
torch.einsum('ij->j',x)|torch.tensordot(x,y,2)|torch.kron(x,y)|torch.outer(x[0],y[0])|x@y.T
x.mm(y.t())|x.matmul(y[0])|torch.mv(x,y[0])|torch.dot(x[0],y[0])|torch.vdot(x[0],y[0])
torch.inner(x,y)|torch.addmm(x@y.T,x,y.T)|torch.linalg.svdvals(x)|torch.linalg.matrix_rank(x)
torch.linalg.cond(x)|torch.trapezoid(x)|torch.linalg.multi_dot([x,y.T,x])|torch.cov(x)
torch.corrcoef(x)|x.histc(5)|torch.bincount((x>0).long().flatten())
torch.bucketize(x,torch.tensor([0.,1.]))|torch.searchsorted(torch.tensor([0.,1.]),x)|x+y|x-1|1-x
x*2|2/x|x/y|x%1|x**2|2**x|-x|abs(x)|x.exp()|x.clamp(0)|x.clamp(min=x.mean())|x.clip(-1,1)
x.add(y,alpha=2)|torch.add(x,y,alpha=3)|x.addcmul(x,y,value=2)|x.addcdiv(x,y)|x.lerp(y,0.3)
x.lerp(y,y)|x+x.mean()|x-x.mean(0)|x/x.norm()|x*x.sum()|x+y[0]|y[0]+x|x+torch.ones(1)
x*torch.arange(float(x.shape[-1]))|x.sign()|x.round()|x.float()|x.double()|x.to(torch.float64)
x.type(torch.float64)|x.half()|x.bool()|x.int()|x.clone()|x.contiguous()|torch.zeros_like(x)
torch.ones_like(x)|torch.full_like(x,2)|x.new_zeros(x.shape)|x.new_ones(2)|x.new_tensor([1.])
torch.empty_like(x).shape|x.new_full((2,),3.)|torch.atan2(x,y)|torch.hypot(x,y)|torch.fmod(x,2)
torch.logaddexp(x,y)|torch.maximum(x,y)|torch.nan_to_num(x)|x.sigmoid()|x.relu()
torch.nn.functional.gelu(x)|torch.nn.functional.softplus(x)|torch.nn.functional.dropout(x,0.0)
torch.nn.functional.pad(x,(1,1))|torch.nn.functional.linear(y,x)
torch.nn.functional.embedding(torch.tensor([0,2]),x)
torch.nn.functional.one_hot((x>0).long()).sum()|torch.nn.functional.softmax(x,dim=1)
torch.nn.functional.glu(torch.cat([x,x],1))|len(x)|x.numel()|x.shape|x.size(0)|x.dim()|x.ndim
x.nelement()|x.stride()|x.is_contiguous()|x.element_size()|x.storage_offset()|x.dtype
float(x.sum())|x.sum().item()|bool((x>0).any())|x[0,0].item()|x.is_floating_point()|x.nbytes
x.itemsize|torch.is_tensor(x)|torch.numel(x)|x.detach().numpy().shape|x.isreal().all()
torch.linalg.pinv(x)|torch.linalg.qr(x).R.abs()|torch.linalg.svd(x)[1]|x.renorm(2,0,1.0)
torch.cumulative_trapezoid(x)|torch.diff(x)|torch.diff(x,dim=0)|torch.fft.fft(x).abs()|x.nansum(0)
torch.count_nonzero(x,dim=0)|torch.any(x,0)|torch.all(x>0,dim=1)|x.argwhere()
torch.combinations(x[0])|torch.block_diag(x,y)|torch.meshgrid(x[0],y[0],indexing='ij')
torch.broadcast_tensors(x,y[0])|torch.atleast_3d(x)|torch.bernoulli(torch.ones_like(x))
torch.clone(x)|torch.swapaxes(x,0,1)|x.unflatten(0,(-1,1))|x.tile(2)|torch.tile(x,(2,1))
x.view_as(y)|x.expand_as(y)|x.reshape_as(y)|x.type_as(y.double())
x.index_add(0,torch.tensor([0]),y[:1])|x.scatter(0,torch.zeros(1,x.shape[1]).long(),y[:1])
x.masked_fill(x>0,0)|x.index_fill(0,torch.tensor([0]),1.)
x.put(torch.tensor([0]),torch.tensor([5.]))|x.unique().detach()
x.gather(0,torch.zeros_like(x).long())|(x//1).detach()|torch.heaviside(x.detach(),y)
"""


def results(expression):
    return eval(f"lambda x, y: {expression}", {"torch": torch})


def flat(value):
    """What a function returned: one thing, or a list or tuple of them."""
    if isinstance(value, list | tuple):
        return [part for one in value for part in flat(one)]
    return [value]


def assert_same(found, expected, what):
    assert len(flat(found)) == len(flat(expected)), what
    for given, whole in zip(flat(found), flat(expected), strict=True):
        mine, plain = given, whole
        if isinstance(given, Slices):  # this rank's part
            assert (given.shape, given.dtype) == (whole.shape, whole.dtype), what
            mine, plain = given.local, given.cut.own(whole.detach())
        if isinstance(plain, torch.Tensor):
            torch.testing.assert_close(
                mine, plain, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda text: what + text
            )
        elif isinstance(plain, float):
            assert mine == pytest.approx(plain, rel=1e-9), what
        else:
            assert mine == plain, what


def score(value):
    """A number that depends on each element of a result in its own way; None without a graph."""
    parts = [x for x in flat(value) if isinstance(x, torch.Tensor) and x.requires_grad]
    weights = [torch.arange(1.0, x.numel() + 1).reshape(x.shape) for x in parts]
    terms = [(x * weight).sum() for x, weight in zip(parts, weights, strict=True)]
    return torch.stack([term.real for term in terms]).sum() if terms else None


class Three(torch.nn.Module):
    """The matrix lies between others in its storage."""

    def __init__(self, matrix):
        super().__init__()
        self.before = torch.nn.Parameter(torch.randn(3, 5))
        self.matrix = torch.nn.Parameter(matrix.clone())
        self.after = torch.nn.Parameter(torch.randn(1))


def compare(shape):
    torch.manual_seed(0)
    matrix, other = torch.randn(shape), torch.randn(shape)
    param = bmt.BMTrainModelWrapper(Three(matrix)).matrix
    for expression in EXPRESSIONS.replace("\n", "|").strip("|").split("|"):
        compute = results(expression)
        plain = matrix.clone().requires_grad_()
        expected, found = compute(plain, other), compute(param, other)
        assert_same(found, expected, f"{expression}: ")
        wanted, got = score(expected), score(found)
        assert (wanted is None) == (got is None), expression
        if wanted is not None and got is not None:
            wanted.backward()
            (got / bmt.world_size()).backward()
            assert_same([param.grad], [plain.grad], f"gradient of {expression}: ")
        param.grad = matrix.clone()
        assert_same(compute(param.grad, other), compute(matrix, other), f"{expression} of grad: ")
        param.grad = None
    for expression in ("x + 1", "2 - x", "x / 2", "-x", "x > 0", "x * x"):
        assert isinstance(results(expression)(param, other), Slices), f"{expression} is whole"


def in_doubles(shape):
    with doubles(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of functions that go
        compare(shape)


@pytest.mark.parametrize("shape", [(4, 5), pytest.param((5, 1), marks=pytest.mark.long)])
def test_functions_give_what_one_process_gets(shape):
    run_ranks(in_doubles, 2 if shape == (4, 5) else 3, shape)
