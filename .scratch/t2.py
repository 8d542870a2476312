import torch, copy, sys
import bmtrain as bmt
bmt.init_distributed()
W=bmt.world_size()
torch.manual_seed(3); torch.backends.cuda.matmul.allow_tf32=False
class B(torch.nn.Module):
    def __init__(s, d=13):
        super().__init__()
        s.a=torch.nn.Linear(d,7); s.b=torch.nn.Linear(7,d); s.n=torch.nn.LayerNorm(d); s.unused=torch.nn.Parameter(torch.ones(3))
        s.frozen=torch.nn.Parameter(torch.randn(d),requires_grad=False); s.some=torch.nn.Parameter(torch.randn(5,d)); s.flag=False
    def forward(s,x):
        y= x+s.frozen*s.b(torch.tanh(s.a(s.n(x))))
        if s.flag: y=y+s.some.sum(0)
        return y
class M(torch.nn.Module):
    def __init__(s):
        super().__init__()
        s.emb=torch.nn.Embedding(11,13); s.layers=torch.nn.ModuleList([B() for _ in range(4)]); s.head=torch.nn.Linear(13,11,bias=False); s.head.weight=s.emb.weight
        s.cls=torch.nn.Parameter(torch.randn(13))
    def forward(s,i):
        x=s.emb(i)+s.cls
        for l in s.layers: x=l(x)
        return s.head(x)
for OptName in ["adam","offload","torch"]:
  for accum in [1,3]:
   for defer in [False,True]:
    ref=M().to(bmt.device()); m=copy.deepcopy(ref); inner=list(m.layers)
    # root plain parameter kept replicated when not wrapped
    m=bmt.BMTrainModelWrapper(m)
    m.extra=torch.nn.Parameter(torch.zeros(11,device=bmt.device())+bmt.rank()); ref.extra=torch.nn.Parameter(torch.zeros(11,device=bmt.device()))
    kw=dict(lr=1e-2,weight_decay=0.1)
    def groups(mod): return [{"params":[p for n,p in mod.named_parameters() if "weight" in n]},{"params":[p for n,p in mod.named_parameters() if "weight" not in n],"weight_decay":0.0}]
    opt={"adam":bmt.optim.AdamOptimizer,"offload":bmt.optim.AdamOffloadOptimizer,"torch":torch.optim.AdamW}[OptName](groups(m),**kw)
    ro=torch.optim.AdamW(groups(ref),**kw)
    om=bmt.optim.OptimManager(loss_scale=1024 if accum==3 else None); om.add_optimizer(opt)
    worst_n=0
    for step in range(8):
        for b in inner: b.flag=step%3==1
        for b in ref.layers: b.flag=step%3==1
        for mm in (m,ref): mm.layers[2].a.weight.requires_grad_(step!=4) if mm is ref else dict(mm.named_parameters())["layers.2.a.weight"].requires_grad_(step!=4)
        g=torch.Generator().manual_seed(step)
        ids=torch.randint(0,11,(accum,W,6,5),generator=g).to(bmt.device()); t=torch.randint(0,11,(accum,W,6,5),generator=g).to(bmt.device())
        f=lambda mod,i,t: torch.nn.functional.cross_entropy((mod(i)+mod.extra).flatten(0,-2),t.flatten())
        om.zero_grad(); ro.zero_grad()
        for a in range(accum):
            om.backward(f(m,ids[a,bmt.rank()],t[a,bmt.rank()])/accum, reduce_gradients=(not defer) or a==accum-1)
        f(ref,ids.flatten(0,2),t.flatten(0,2)).backward()
        n=om.clip_grad_norm(opt.param_groups,0.7); rn=torch.nn.utils.clip_grad_norm_(ref.parameters(),0.7)
        worst_n=max(worst_n,abs(n-rn)/rn)
        om.step(); ro.step()
    sd=m.state_dict(); rs={k:v.cpu() for k,v in ref.state_dict().items()}
    w=max(((sd[k]-rs[k]).norm()/rs[k].norm()).item() for k in rs)
    bmt.print_rank(OptName,accum,defer,"world",W,"worst %.2e norm %.1e"%(w,worst_n))
    st=om.state_dict(gather_opt=True); om.load_state_dict(st)
    st2=om.state_dict(gather_opt=True)
    for i,a in st["optimizers"][0]["state"].items():
        for k,v in a.items():
            v2=st2["optimizers"][0]["state"][i][k]
            assert (torch.equal(v,v2) if isinstance(v,torch.Tensor) else v==v2),(i,k)
