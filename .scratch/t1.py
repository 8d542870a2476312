import torch, copy, sys
import bmtrain as bmt
bmt.init_distributed(zero_level=int(sys.argv[1]))
torch.manual_seed(3); torch.backends.cuda.matmul.allow_tf32=False
class B(torch.nn.Module):
    def __init__(s, d=13):
        super().__init__()
        s.a=torch.nn.Linear(d,7); s.b=torch.nn.Linear(7,d); s.n=torch.nn.LayerNorm(d); s.unused=torch.nn.Parameter(torch.ones(3))
        s.drop=torch.nn.Dropout(0.0)
    def forward(s,x): return x+s.drop(s.b(torch.tanh(s.a(s.n(x)))))
class M(torch.nn.Module):
    def __init__(s):
        super().__init__()
        s.emb=torch.nn.Embedding(11,13); s.layers=torch.nn.ModuleList([B() for _ in range(4)]); s.head=torch.nn.Linear(13,11,bias=False); s.head.weight=s.emb.weight
        s.cls=torch.nn.Parameter(torch.randn(13))
    def forward(s,i):
        x=s.emb(i)+s.cls
        for l in s.layers: x=l(x)
        x=s.layers[0](x)
        return s.head(x)
ref=M().to(bmt.device()); m=copy.deepcopy(ref)
m.layers=bmt.TransformerBlockList([bmt.Block(b, use_checkpoint=(sys.argv[2]=="1")) for b in m.layers])
m=bmt.BMTrainModelWrapper(m)
assert isinstance(m,M)
W=bmt.world_size()
opt=torch.optim.AdamW(m.parameters(),lr=1e-2); ro=torch.optim.AdamW(ref.parameters(),lr=1e-2)
for step in range(5):
    g=torch.Generator().manual_seed(step)
    ids=torch.randint(0,11,(W,6,5),generator=g).to(bmt.device()); t=torch.randint(0,11,(W,6,5),generator=g).to(bmt.device())
    f=lambda mod,i,t: torch.nn.functional.cross_entropy(mod(i).flatten(0,-2),t.flatten())
    l=f(m,ids[bmt.rank()],t[bmt.rank()]); (l/W).backward()
    rl=f(ref,ids.flatten(0,1),t.flatten(0,1)); rl.backward()
    opt.step(); ro.step(); opt.zero_grad(); ro.zero_grad()
sd=m.state_dict(); rs={k:v.cpu() for k,v in ref.state_dict().items()}
assert list(sd)==list(rs),(list(sd),list(rs))
w=max(((sd[k]-rs[k]).norm()/rs[k].norm()).item() for k in rs)
bmt.print_rank("world",W,"worst",w, l.item(), rl.item())
m.load_state_dict(rs)
sd=m.state_dict()
assert all(torch.equal(sd[k],rs[k]) for k in rs)
m2=copy.deepcopy(m); assert all(torch.equal(a,b) for a,b in zip(m2.state_dict().values(),rs.values()))
