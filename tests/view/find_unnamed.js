
const ownName = (e) =>
  (e.getAttribute('aria-label') || e.title || e.textContent || e.placeholder || e.alt || '').trim();
const labels = (e) => [...(e.labels || [])].map((l) => l.textContent).join('').trim();
const images = (e) => [...e.querySelectorAll('img[alt]')].map((i) => i.alt).join('');
const selector = 'a[href], button, input, select, summary, progress, [role=img], [role=group], '
  + 'table, section, [tabindex="0"]';
return [...document.querySelectorAll(selector)]
  .filter((e) => e.checkVisibility() && !(ownName(e) || labels(e) || images(e)))
  .map((e) => e.outerHTML.slice(0, 200));
