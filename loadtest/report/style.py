"""How a report looks: light, dark, on a phone and on paper. No address outside the file."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5a6675;
--line:#dfe3e8;--good:#0b7a4b;--bad:#b42318;--warn:#9a5b00;--good-soft:#e3f5ec;
--bad-soft:#fdeceb;--warn-soft:#fdf1dc;--c1:#0072b2;--c2:#d55e00;--c3:#00875f;--c4:#a8528a;
--c5:#c58a00;--c6:#3596cf;--c7:#5b5fc7;--c8:#77808c}
@media (prefers-color-scheme:dark){:root{--ground:#11161d;--card:#1a212b;--ink:#e8ecf1;
--soft:#a3afbd;--line:#323c49;--good:#5fd6a1;--bad:#ff8f85;--warn:#f2bb62;--good-soft:#143528;
--bad-soft:#3d1c1a;--warn-soft:#3a2b10;--c1:#58b4ee;--c2:#ff8b4a;--c3:#3fcf9f;--c4:#e08cc2;
--c5:#eec04a;--c6:#9ad4f7;--c7:#a7abff;--c8:#a0aab6}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:72rem;margin:0 auto;padding:1.25rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.25rem 0 .75rem}
h3{font-size:1rem;margin:1.25rem 0 .5rem}
p{margin:.35rem 0}
code,pre{font:.85em/1.5 ui-monospace,"DejaVu Sans Mono",monospace}
pre{overflow-x:auto;margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
.note{color:var(--soft);font-size:.86rem}
header .note{margin-top:.3rem}
.card,.tile,figure,.scroll{background:var(--card);border:1px solid var(--line);
border-radius:.6rem}
.card{padding:.8rem 1rem;margin:.75rem 0}
.verdict{border-left:.4rem solid var(--warn);margin-top:1rem}
.verdict.good{border-left-color:var(--good)}
.verdict.bad{border-left-color:var(--bad)}
.badge{display:inline-block;padding:.05rem .55rem;border-radius:1rem;font-size:.82rem;
font-weight:600;white-space:nowrap;background:var(--warn-soft);color:var(--warn)}
.badge.good{background:var(--good-soft);color:var(--good)}
.badge.bad{background:var(--bad-soft);color:var(--bad)}
.tiles{display:grid;gap:.75rem;grid-template-columns:repeat(auto-fill,minmax(10.5rem,1fr));
margin:1rem 0}
.tile{padding:.7rem .9rem}
.tile b{display:block;font-size:1.45rem;line-height:1.3;font-variant-numeric:tabular-nums}
.tile .note{display:block}
.plots{display:grid;gap:.75rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,25rem),1fr))}
figure{margin:0;padding:.8rem .9rem .5rem;break-inside:avoid}
figcaption strong{display:block}
.legend{display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.86rem;margin:.3rem 0 0}
.key{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;margin-right:.35rem;
background:currentColor;vertical-align:-.08rem}
svg{display:block;width:100%;height:auto;margin-top:.3rem}
svg text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .row,svg .told{fill:var(--ink);paint-order:stroke;stroke:var(--card);stroke-width:4px;
stroke-linejoin:round}
.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.mark{stroke:var(--soft);stroke-width:1.4;stroke-dasharray:5 4}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}
.dashed{stroke-dasharray:7 4}
.band{fill:currentColor;opacity:.18}
.dot{fill:currentColor;stroke:var(--card);stroke-width:1.2}
.fill{fill:currentColor}
.span{stroke:currentColor;stroke-width:3;stroke-linecap:round}
.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}
.c5{color:var(--c5)}.c6{color:var(--c6)}.c7{color:var(--c7)}.c8{color:var(--c8)}
.better{color:var(--good)}.worse{color:var(--bad)}.inconclusive{color:var(--soft)}
.scroll{overflow-x:auto;margin:.75rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:.6rem .8rem .2rem;font-weight:600}
th,td{padding:.35rem .8rem;text-align:right;border-top:1px solid var(--line);vertical-align:top}
thead th{border-top:0;color:var(--soft);font-weight:600;white-space:nowrap}
th:first-child,th.text{text-align:left}
tbody th{font-weight:500}
td.text{text-align:left;min-width:12rem}
td.number{white-space:nowrap}
tbody th{min-width:7rem;overflow-wrap:break-word}
td .note,th .note{display:block;white-space:nowrap}
.cards{display:flex;flex-wrap:wrap;gap:.75rem;align-items:flex-start;margin:.75rem 0}
.cards .scroll{margin:0;max-width:100%}
.facts table{width:auto;min-width:100%}.facts th{min-width:min(16rem,40vw)}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
details{margin:.75rem 0}
summary{cursor:pointer;padding:.2rem 0}
ul.checks{list-style:none;margin:0;padding:.4rem 1rem}
ul.checks li{padding:.3rem 0;display:flex;gap:.7rem;align-items:baseline}
@media (max-width:38rem){svg text{font-size:14.5px}.tiles{grid-template-columns:1fr 1fr}
.tile b{font-size:1.2rem}th,td{padding:.35rem .55rem}}
@media print{:root{color-scheme:light;--ground:#fff;--card:#fff;--ink:#000;--soft:#444;
--line:#ccc;--good:#0b7a4b;--bad:#b42318;--warn:#9a5b00;--good-soft:#fff;--bad-soft:#fff;
--warn-soft:#fff;--c1:#0072b2;--c2:#d55e00;--c3:#00875f;--c4:#a8528a;--c5:#c58a00;--c6:#3596cf;
--c7:#5b5fc7;--c8:#77808c}body{font-size:11pt}main{max-width:none;padding:0}
.scroll{overflow:visible}h2{break-after:avoid}tr,.card,.tile{break-inside:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
