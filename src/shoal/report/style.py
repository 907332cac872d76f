"""The style sheet of the report and of the live page: light, dark and paper; nothing is fetched."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1b2126; --soft: #5a646d; --rule: #e2e6e9; --grid: #eceff1; --tint: #f6f8f9;
  --s0: #0068a8; --s1: #cc5500; --s2: #00855f; --s3: #b0468a; --s4: #a07400; --s5: #2f9fd8;
  --s6: #6a4fc9; --fault: #c2262e; --base: #5a646d;
  --compute: #0068a8; --send: #d98200; --wait: #d2a3bf; --other: #d5dade;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181b; --ink: #e4e8ea; --soft: #9ba6ae; --rule: #2c3338; --grid: #242a2e; --tint: #1b2024;
    --s0: #58aee6; --s1: #f28b4a; --s2: #35c496; --s3: #e08fc0; --s4: #dcb03f; --s5: #a5d8fa;
    --s6: #b09cf5; --fault: #ff7b7b; --base: #aab4bb;
    --compute: #4a9fd8; --send: #e9a63c; --wait: #8c5f79; --other: #3d464c;
  }
}
@media print {
  :root {
    color-scheme: light;
    --page: #ffffff; --ink: #000000; --soft: #444444; --rule: #cccccc; --grid: #e6e6e6; --tint: #ffffff;
    --s0: #0068a8; --s1: #cc5500; --s2: #00855f; --s3: #b0468a; --s4: #a07400; --s5: #2f9fd8;
    --s6: #6a4fc9; --fault: #c2262e; --base: #5a646d;
    --compute: #0068a8; --send: #d98200; --wait: #d2a3bf; --other: #d5dade;
  }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  figure, tr, li { break-inside: avoid; }
  h2 { break-after: avoid; }
  main { max-width: none; padding: 0; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 56px clamp(20px, 4vw, 48px) 96px; }
h1 { margin: 0; font-size: clamp(26px, 3.4vw, 34px); line-height: 1.2; font-weight: 650; }
h2 { margin: 72px 0 8px; font-size: 21px; line-height: 1.3; font-weight: 650; }
p { max-width: 68ch; margin: 12px 0; text-wrap: pretty; }
.facts { margin: 10px 0 0; color: var(--soft); }
.lead { margin-top: 32px; font-size: 18px; }
.verdicts { margin: 20px 0 0; padding: 0; list-style: none; }
.verdicts li { display: grid; grid-template-columns: 12em 1fr; gap: 0 24px; padding: 9px 0; }
.verdicts li { border-top: 1px solid var(--rule); }
.verdicts b { font-weight: 600; overflow-wrap: anywhere; }
.verdicts span { text-wrap: pretty; }
.verdicts li:last-child { border-bottom: 1px solid var(--rule); }
.numbered li { grid-template-columns: 1.5em 1fr; gap: 0 8px; }
pre { margin: 12px 0; padding: 12px 16px; background: var(--tint); border: 1px solid var(--rule); }
pre { overflow-x: auto; font: 14px/1.6 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.remark, .note, .empty { color: var(--soft); }
.note { font-weight: 400; white-space: nowrap; }
.note::before { content: "· "; }
.scroll { overflow-x: auto; margin-top: 20px; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--s0); outline-offset: 3px; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
.summary { width: 100%; }
.summary th, .summary td { padding: 9px 0 9px 20px; text-align: right; white-space: nowrap; }
.summary thead th { color: var(--soft); font-size: 14px; font-weight: 500; line-height: 1.3; }
.summary thead th { border-bottom: 1px solid var(--soft); white-space: normal; vertical-align: bottom; }
.summary tbody tr + tr > * { border-top: 1px solid var(--rule); }
.summary th:first-child { padding-left: 0; text-align: left; font-weight: 500; }
.summary tbody th:first-child { position: sticky; left: 0; background: var(--page); padding-right: 8px; }
.summary .best { font-weight: 700; }
.summary .best > th:first-child { font-weight: 700; }
.swatch { flex: none; overflow: visible; vertical-align: -1px; margin-right: 9px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 26px; margin: 18px 0 0; padding: 0; list-style: none; }
.legend { font-size: 15px; }
.legend li { display: flex; align-items: center; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.pair { gap: 40px 56px; margin-top: 28px; }
.findings > * { max-width: 620px; }
figure { margin: 0; min-width: 0; }
figcaption { margin-bottom: 12px; font-size: 15px; font-weight: 600; line-height: 1.4; }
.chart { display: block; width: 100%; overflow: visible; }
.chart:not(.bars) { height: auto; }
.chart text { fill: var(--soft); font-size: 12.5px; font-variant-numeric: tabular-nums; }
.chart .name { fill: var(--ink); font-size: 14px; }
.chart .value { font-size: 13.5px; }
.bars text { font-size: 13px; }
.grid { stroke: var(--grid); stroke-width: 1; fill: none; }
.axis { stroke: var(--soft); stroke-width: 1; fill: none; opacity: 0.7; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.event { stroke-width: 1; stroke-dasharray: 3 3; }
.fill { fill: var(--c); }
.mark { stroke: var(--page); stroke-width: 1; }
.piece { stroke: var(--page); stroke-width: 1; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); }
.s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); }
.base { --c: var(--base); } .line.base { stroke-dasharray: 2 5; }
.line.d1 { stroke-dasharray: 7 5; } .line.d2 { stroke-dasharray: 1 5 7 5; }
.t-compute { --c: var(--compute); } .t-send { --c: var(--send); }
.t-wait { --c: var(--wait); } .t-other { --c: var(--other); }
.timeline { margin-top: 32px; }
.idle { fill: var(--grid); }
.pipeline .number { fill: var(--page); font-size: 11px; pointer-events: none; }
.pixels { display: block; image-rendering: pixelated; }
.dream { margin: 0 0 14px; }
.dream figcaption { margin: 0 0 4px; font-weight: 400; color: var(--soft); }
details { border-top: 1px solid var(--rule); }
details:last-of-type { border-bottom: 1px solid var(--rule); }
.settings { margin-top: 20px; }
summary { padding: 11px 0; cursor: pointer; }
summary:hover { color: var(--s0); }
.config { margin: 2px 0 18px 18px; font-size: 15px; }
.config th, .config td { padding: 3px 28px 3px 0; text-align: left; font-weight: 400; vertical-align: top; }
.config th { color: var(--soft); }
.config td { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 14px; }
.config td { overflow-wrap: anywhere; }
.live > svg.chart { display: none; }
.plot { position: relative; min-height: 210px; border-radius: 3px; }
.plot:focus-visible, button:focus-visible, input:focus-visible, a:focus-visible {
  outline: 2px solid var(--s0); outline-offset: 3px;
}
.plot .u-select { background: var(--ink); opacity: 0.1; }
.plot .u-hz .u-cursor-x { border-right: 1px solid var(--soft); opacity: 0.5; }
.tip { position: absolute; top: 0; left: 0; z-index: 3; max-width: min(280px, 100%); padding: 5px 9px; }
.tip { background: var(--ink); color: var(--page); border-radius: 4px; font-size: 13px; line-height: 1.4; }
.tip { pointer-events: none; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.dot { position: absolute; top: -5px; left: -5px; width: 10px; height: 10px; border-radius: 50%; }
.dot { border: 2px solid var(--page); pointer-events: none; z-index: 2; }
.unseen { position: absolute; width: 1px; height: 1px; margin: 0; overflow: hidden; clip-path: inset(50%); }
button { font: inherit; color: inherit; cursor: pointer; }
.reset { position: absolute; top: 6px; right: 14px; z-index: 4; padding: 2px 10px; font-size: 13px; }
.reset { background: var(--page); border: 1px solid var(--soft); border-radius: 4px; }
.toggle { display: flex; align-items: center; margin: -4px -6px; padding: 4px 6px; text-align: left; }
.toggle { background: none; border: 0; border-radius: 4px; overflow-wrap: anywhere; }
.toggle:hover, .sort:hover { color: var(--s0); }
.toggle[aria-pressed="false"] { color: var(--soft); text-decoration: line-through; }
.toggle[aria-pressed="false"] .swatch { opacity: 0.3; }
.sort { padding: 0; background: none; border: 0; text-align: inherit; font-weight: inherit; }
[aria-sort="ascending"] .sort::after { content: " ↑"; }
[aria-sort="descending"] .sort::after { content: " ↓"; }
[hidden] { display: none !important; }
@media print {
  .live > svg.chart { display: block; }
  .plot { display: none; }
}
@media (max-width: 560px) {
  main { padding-top: 32px; }
  h2 { margin-top: 56px; }
  .verdicts li { grid-template-columns: 1fr; }
  .chart:not(.bars) text { font-size: 14.5px; }
  .pipeline .number { display: none; }
}
""".strip()
