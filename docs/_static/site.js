// site.js — tables and code that are wider than the page scroll by keyboard, too.
for (const box of document.querySelectorAll(".table-wrapper, .highlight pre")) {
    const may_scroll = () => {
        if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
        else box.removeAttribute("tabindex");
    };
    new ResizeObserver(may_scroll).observe(box);
}
