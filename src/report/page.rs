//! The page around a document: one file, no network, no script.

use super::document::Document;
use super::svg::escaped;

/// Everything the browser is told about looks. Series differ by dash and marker; colour only helps.
const STYLE: &str = "
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #57606a; --rule: #d0d7de; --panel: #f6f8fa;
  --s0: #1b1f24; --s1: #0a58ca; --s2: #a8480a; --s3: #7a3e9d; --loud: #8a1c1c; --loud-paper: #fdeeee; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e8ea; --soft: #a3abb3; --rule: #3a4149;
  --panel: #1d2125; --s0: #e6e8ea; --s1: #6ea8fe; --s2: #ffb27a; --s3: #d3a4f0; --loud: #ffb4b4; --loud-paper: #3a1a1a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; overflow-wrap: anywhere; }
main { max-width: 68rem; margin: 0 auto; padding: 1rem 1rem 4rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 1rem 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
p, ul, dl, pre, figure { margin: .5rem 0; }
p, li, figcaption { max-width: 50rem; }
.lead, figcaption { color: var(--soft); font-size: .92rem; }
.loud { border: 2px solid var(--loud); background: var(--loud-paper); color: var(--loud); padding: .6rem .8rem;
  font-weight: 700; max-width: none; }
pre { background: var(--panel); border: 1px solid var(--rule); padding: .7rem .9rem; overflow-x: auto; }
code { font: .92rem/1.5 ui-monospace, 'DejaVu Sans Mono', monospace; overflow-wrap: normal; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; padding: .28rem .7rem .28rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { border-bottom: 2px solid var(--soft); font-weight: 600; }
.number { text-align: right; }
.tight { white-space: nowrap; }
dl > div { display: grid; grid-template-columns: 9rem 1fr; gap: .2rem 1rem; padding: .2rem 0;
  border-bottom: 1px solid var(--rule); }
dt { color: var(--soft); }
dd { margin: 0; }
@media (max-width: 34rem) { dl > div { grid-template-columns: 1fr; } }
svg { display: block; width: 100%; min-width: 34rem; max-width: 60rem; height: auto; font-size: 12.5px;
  font-family: inherit; }
svg text { fill: var(--ink); }
svg .tick, svg .note, svg .name { fill: var(--soft); }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1.2; }
svg .limit { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 2 4; }
svg .stroke { fill: none; stroke-width: 2; }
svg .whisker { stroke-width: 1.4; }
svg .mark { fill: var(--paper); stroke-width: 2; }
svg .solid, svg .hollow { stroke-width: 2; }
svg .hollow { fill: var(--paper); }
svg .cross { stroke: var(--loud); stroke-width: 2.4; }
svg .s0 { stroke: var(--s0); } svg .s1 { stroke: var(--s1); } svg .s2 { stroke: var(--s2); } svg .s3 { stroke: var(--s3); }
svg .stroke.s1 { stroke-dasharray: 7 4; } svg .stroke.s2 { stroke-dasharray: 2 3; } svg .stroke.s3 { stroke-dasharray: 9 3 2 3; }
svg .solid.s0, svg .mark.s0 { fill: var(--s0); } svg .solid.s1 { fill: var(--s1); }
svg .block { stroke: var(--paper); stroke-width: .5; }
svg .block.s0 { fill: var(--soft); } svg .block.s1 { fill: var(--s1); } svg .block.s2 { fill: var(--s2); }
svg .block.s3 { fill: var(--s3); }
@media print { body { font-size: 11px; } svg, .scroll { min-width: 0; overflow: visible; } h2 { break-after: avoid; }
  figure { break-inside: avoid; } }
";

/// A whole page.
pub(super) fn page(title: &str, lead: &str, document: &Document) -> String {
    let (title, lead) = (escaped(title, 300), escaped(lead, 600));
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"referrer\" content=\"no-referrer\">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n\
         <body>\n<main>\n<h1>{title}</h1>\n<p class=\"lead\">{lead}</p>\n{}</main>\n</body>\n</html>\n",
        document.html()
    )
}
